"""Check by one request whether a Kafka broker serves clients."""

from __future__ import annotations

import asyncio

from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaError

from gateway.kafka.driver import wire


async def broker_answers(host: str, port: int, timeout_s: float = 2.0, node: int | None = None) -> bool:
    """Whether the broker answers a metadata request that lists `node`, or any broker if `node` is None.

    A KRaft broker listens before the controller has unfenced it; until then its answer does not list itself.
    """
    connection = AIOKafkaConnection(host, port, client_id="trivium", request_timeout_ms=round(1000 * timeout_s))
    try:
        async with asyncio.timeout(timeout_s):
            await connection.connect()
            answer = await connection.send(wire.metadata_request(()))
    except (KafkaError, OSError, TimeoutError):
        return False
    finally:
        connection.close()
    nodes = [number for number, *_ in answer.brokers]
    return bool(nodes) if node is None else node in nodes
