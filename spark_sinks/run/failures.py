"""What a job says when it fails: one line with the cause and what helps, from an error of Spark's many lines."""

from __future__ import annotations

import re
from typing import Final

from spark_sinks.spec.meaning import ADVICE

_QUERY: Final = "=== Streaming Query ==="
"""Spark appends the query's plan below this line."""
_PROXY: Final = "An exception was raised by the Python Proxy"
_WORKER: Final = "An exception was thrown from the Python worker"
_LOST: Final = "Some data may have been lost because they are not available in Kafka"
_REASON: Final = re.compile(r"Reason: (.+?)\.*$", re.MULTILINE)
_LOST_HELP: Final = (
    "Kafka has deleted records that the job had not read ({}). With accept_data_loss = true it continues with those "
    "that are left; a longer retention.ms or retention.bytes of the topic keeps them until they are read"
)
_STATE: Final = re.compile(r"\[(STATE_STORE_\w*(?:SCHEMA|COLUMN_FAMIL)\w*(?:\.\w+)?)\]")
_STATE_HELP: Final = f"the state in the checkpoint has other columns than the job needs now (Spark's {{}}): {ADVICE}"

_TIMESTAMP: Final = re.compile(r"Record at topic (\S+) partition (\d+) offset (\d+) has timestamp value (-?\d+)")
_TIMESTAMP_HELP: Final = (
    "topic {0} has a record that Spark cannot read, in partition {1} at offset {2}: its timestamp {3} is not in "
    'milliseconds. A replay with timestamp = "now" copies the topic to one that the job can read. Or delete the '
    "records up to it (kafka-delete-records), also for other readers, and start once with accept_data_loss = true. "
    "The topic's message.timestamp.after.max.ms, 1h by default, refuses such records"
)


def told(error: BaseException) -> str:
    """Return the line that says why a job failed."""
    text = str(error).partition(_QUERY)[0].strip()
    if _LOST in text:
        reason = _REASON.search(text)
        return _LOST_HELP.format(reason[1] if reason else first_line(text.replace(_LOST, "")))
    if (state := _STATE.search(text)) is not None:
        return _STATE_HELP.format(state[1])
    if (record := _TIMESTAMP.search(text)) is not None:
        return _TIMESTAMP_HELP.format(*record.groups())
    if "Traceback" in text and (_PROXY in text or _WORKER in text):
        return _cause(text)
    return first_line(text) or type(error).__name__


def first_line(text: str) -> str:
    """Return the first line that is not empty; empty if all are."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _cause(text: str) -> str:
    """Return the error below the last stack frame of a traceback."""
    lines = text.splitlines()
    last = max((number for number, line in enumerate(lines) if line.startswith('  File "')), default=0)
    return next((line for line in lines[last + 1 :] if line.strip() and not line.startswith(" ")), first_line(text))
