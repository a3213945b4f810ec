"""Opens the configured audit trail; an optional part."""

from __future__ import annotations

import contextlib

from gateway.audit.sinks import AuditTopicSink, FileSink
from gateway.audit.trail import AuditTrail
from gateway.kafka.cluster.topics import Topics
from gateway.kafka.publish.publisher import Publisher
from gateway.runtime.audited import audit
from gateway.runtime.secret import Redactor, secrets_in
from gateway.runtime.spawn import Spawn
from gateway.settings.config import Config


def open_trail(
    config: Config,
    gateway: str,
    publisher: Publisher,
    topics: Topics,
    *,
    spawn: Spawn,
    stack: contextlib.AsyncExitStack,
) -> AuditTrail:
    """Start the trail; its stop is pushed onto `stack`. Without a file and a topic it stays off.

    Raises:
        ConfigError: the file cannot be opened.
    """
    trail = AuditTrail(gateway, Redactor(secrets_in(config)))
    if config.audit.file is not None:
        file = FileSink(config.audit.file, trail, spawn)
        stack.push_async_callback(file.stop)
        trail.sinks += (file.write,)
        trail.reopen = file.reopen
    if config.audit.topic is not None:
        trail.sinks += (AuditTopicSink(config.audit.topic, trail, publisher, topics).write,)
    if trail.sinks:
        audit.trail = trail
        stack.callback(_end, trail)
    return trail


def _end(trail: AuditTrail) -> None:
    audit.trail = None
    trail.end()
