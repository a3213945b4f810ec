"""The mapper of messages to records and back: in C where the extension was built (ADR 0088), else in Python."""

try:
    from mapping.amqp._native import from_records, to_record, to_records
except ImportError:  # not built, or switched off; `gateway.native` reports which
    from mapping.amqp.incoming import to_record, to_records
    from mapping.amqp.outgoing import from_records

__all__ = ["from_records", "to_record", "to_records"]
