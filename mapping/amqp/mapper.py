"""What maps the messages of a link and the records of its receiver: C where it was built (ADR 0058), else Python."""

try:
    from mapping.amqp._native import Mapper, from_records
except ImportError:  # not built, or not wanted: `gateway.native` tells
    from mapping.amqp.incoming import Mapper
    from mapping.amqp.outgoing import from_records

__all__ = ["Mapper", "from_records"]
