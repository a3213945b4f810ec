"""Structured logs on standard error: readable text on a terminal, otherwise JSON lines.

Secrets are kept out in three ways: our code logs none, values under the name of a secret are blanked here, and so are
the configuration's secrets anywhere in a line. Tracebacks show no local variables, because those may hold passwords.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Final, TextIO

import structlog

from gateway.kafka.driver.outage import outage
from gateway.runtime.failures import Repeats
from gateway.runtime.secret import BLANK, Redactor, is_secret_name
from gateway.runtime.texts import cut
from gateway.settings.config import LogConfig
from gateway.views.clients import CONNECTION_LOG

QUIET_LIBRARIES: Final = ("aiokafka", "kafka", "aiohttp", "amqtt", "asyncio", "transitions", "sqlalchemy")
REPEAT_S: Final = 30.0
LONGEST_REPEAT_S: Final = 3600.0
REPEAT_LINES: Final = 512
OWN_FIRST: Final = 10  # the same line of ours names different clients, topics or groups
FOLDED_ALREADY: Final = frozenset(
    {"gateway.runtime.failures", "gateway.kafka.driver.outage", "gateway.kafka.driver.fetch.unreadable"}
)
LONGEST: Final = 2048  # characters of a value: a client that is not logged in may send a client id of 64 KiB


def redact(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Blank the values of keys that name a secret, at any depth, and shorten long texts (a structlog processor)."""
    for key, value in event.items():
        if key != "event" or not isinstance(value, str):  # the event's text is ours, or a library's: whole
            event[key] = BLANK if is_secret_name(key) else _cleaned(value)
    return event


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return cut(value, LONGEST)
    if isinstance(value, Mapping):
        return {key: BLANK if is_secret_name(key) else _cleaned(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)) and any(isinstance(inner, (Mapping, list, tuple)) for inner in value):
        return [_cleaned(inner) for inner in value]
    return value


class Fold(logging.Filter):
    """Folds repeated warnings and errors, ours and the libraries', and aiokafka's altogether while we report an outage.

    Lines are the same if their texts are the same before values are filled in. A library's line passes once per
    interval, ours ten times and once while Kafka is away; then with the number of those held back. The interval doubles
    while they go on, up to an hour.
    """

    def __init__(self, interval_s: float = REPEAT_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._repeats = Repeats(interval_s, REPEAT_LINES, clock, longest_s=LONGEST_REPEAT_S)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether `record` is written."""
        is_library = record.name.partition(".")[0] in QUIET_LIBRARIES
        if record.levelno < logging.WARNING or record.name in FOLDED_ALREADY:
            return True
        if outage.lasts and record.name.startswith("aiokafka"):
            return False
        message = record.msg  # structlog's is a dictionary
        text = message.get("event") if isinstance(message, dict) else message
        first = 1 if is_library or outage.lasts else OWN_FIRST
        held = self._repeats.suppressed((record.name, record.levelno, str(text)), first)
        if held and isinstance(message, dict):
            record.msg = {**message, "more_like_this": held}
        elif held:
            record.msg = f"{record.getMessage()} ({held} more like this)"
            record.args = None
        return held is not None


def configure_logs(
    config: LogConfig, stream: TextIO | None = None, *, cache: bool = True, secrets: Iterable[str] = ()
) -> None:
    """Set up structlog and the standard library's logging. Call it once, at the start.

    Libraries log from WARNING on, in the same format. `stream` is standard error by default. `cache` keeps a logger
    after its first use (faster); tests that reconfigure logging turn it off. `secrets` are blanked anywhere in a line,
    including lines of libraries.
    """
    out = sys.stderr if stream is None else stream
    level = logging.getLevelNamesMapping()[config.level.upper()]
    console = config.format == "console" or (config.format == "auto" and out.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=cache,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=_last_steps(Redactor(secrets), console=console, colours=console and out.isatty()),
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in QUIET_LIBRARIES:
        library = logging.getLogger(name)
        library.setLevel(max(level, logging.WARNING))
    logging.getLogger(CONNECTION_LOG).setLevel(logging.NOTSET if config.connections else logging.WARNING)
    # A logger's filter does not see lines of its child loggers; a handler's filter does.
    handler.addFilter(Fold())


def _last_steps(redactor: Redactor, *, console: bool, colours: bool) -> Sequence[Any]:
    """Return the processors that finish a line. Libraries may log secrets in texts and tracebacks: the last blanks."""
    steps: list[Any] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, redact]

    def blank(logger: Any, method: str, line: str) -> str:
        return redactor.clean(line)

    if console:
        plain = structlog.dev.plain_traceback  # the default, by rich, prints local variables
        return [*steps, structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=plain), blank]
    return [*steps, structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str), blank]
