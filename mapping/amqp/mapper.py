"""The mapper of messages to records and back: in C where the extension was built (ADR 0058), else in Python."""

try:
    from mapping.amqp._native import Mapper, from_records
except ImportError:  # not built, or switched off; `gateway.native` reports which
    from mapping.amqp.incoming import Mapper
    from mapping.amqp.outgoing import from_records

__all__ = ["Mapper", "from_records"]
