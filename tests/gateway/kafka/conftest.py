"""What tests of several rooms share: a publisher with everything it needs, and readers wired as in the application."""

from __future__ import annotations

from tests.support.publisher_kit import frozen, kit, own_topic, read_topic
from tests.support.reader_kit import producer, readers
from tests.support.secured import endpoint, secured_broker

__all__ = ["endpoint", "frozen", "kit", "own_topic", "producer", "read_topic", "readers", "secured_broker"]
