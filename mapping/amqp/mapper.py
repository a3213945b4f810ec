"""What maps the messages of a link: C where it was built (ADR 0058), else Python."""

try:
    from mapping.amqp._native import Mapper
except ImportError:  # not built, or not wanted: `gateway.native` tells
    from mapping.amqp.incoming import Mapper

__all__ = ["Mapper"]
