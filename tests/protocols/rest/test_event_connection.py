"""The connection of an event stream: heartbeats in silence, and the end of its answer."""

from __future__ import annotations

from protocols.rest.streams.event_connection import SILENT, EventConnection
from protocols.rest.streams.streaming import LAST_CHUNK, chunk, heartbeat


def test_a_silent_stream_gets_a_heartbeat_each_time_and_one_with_events_none() -> None:
    connection = EventConnection(15.0)
    assert connection.tick(0.0) == []
    for now in (15.0, 30.0, 45.0):
        assert connection.next_deadline() == now
        assert connection.tick(now) == [SILENT]
        connection.send_heartbeat("0:1")
        assert connection.data_to_send() == chunk(heartbeat("0:1"))
    assert connection.tick(50.0) == []
    connection.send(b"event")
    assert connection.tick(60.0) == []
    assert connection.tick(75.0) == [SILENT]


def test_the_end_is_sent_once_and_only_to_a_client_that_is_there() -> None:
    connection = EventConnection(15.0)
    connection.send(b"event")
    connection.end()
    connection.end()
    connection.send(b"later")
    assert connection.closing
    assert connection.next_deadline() is None
    assert connection.waiting == connection.total == len(b"event" + LAST_CHUNK)
    assert connection.data_to_send() == b"event" + LAST_CHUNK
    assert connection.data_to_send() == b""
    left = EventConnection(15.0)
    assert left.receive_data(b"GET / HTTP/1.1") == left.receive_eof() == []
    left.end()
    assert left.closing
    assert left.data_to_send() == b""
