"""Fixtures for tests of several rooms: a publisher with its dependencies, and readers wired as in the application."""

from __future__ import annotations

from tests.support.publisher_kit import frozen, kit, own_topic, read_topic
from tests.support.reader_kit import producer, readers
from tests.support.secured import endpoint, secured_broker

__all__ = ["endpoint", "frozen", "kit", "own_topic", "producer", "read_topic", "readers", "secured_broker"]
