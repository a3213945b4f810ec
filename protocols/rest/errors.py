"""Errors of HTTP requests: status, one line of text, and further fields of the answer."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

INTERNAL_ERROR: Final = "The request failed inside the gateway; its log says why"
SHUTTING_DOWN: Final = "The gateway is shutting down"
RETRY_AFTER_S: Final = 1
"""The usual `Retry-After`: the state of a stalled broker is checked again within this time."""
TOPIC_LIMIT_RETRY_AFTER_S: Final = 60
"""`Retry-After` when a limit of topics is reached: an administrator must delete a topic first."""
_AFTER_S: Final = {503: RETRY_AFTER_S, 429: TOPIC_LIMIT_RETRY_AFTER_S}


def retry_after(status: int) -> tuple[tuple[str, str], ...]:
    """Return the field `Retry-After` for a `status` from Kafka's side; none if a retry does not help."""
    after = _AFTER_S.get(status)
    return () if after is None else (("Retry-After", str(after)),)


class Fault(enum.Enum):
    """The cause of an error, where a dialect has an error code of its own for it (`confluent.NUMBERS`)."""

    BAD_NUMBER = "a number in the path, such as a partition, is not valid"
    TOPIC = "the topic does not exist"
    PARTITION = "the partition does not exist"
    CONSUMER = "the consumer does not exist"
    NAME_TAKEN = "the consumer exists already"
    EXCLUSIVE = "it conflicts with the consumer's subscription or assignment"
    NOT_ASSIGNED = "the partition is not assigned to the consumer"
    FORMAT = "the consumer has another format, or it cannot represent the record"
    MEDIA = "the body's media type is not supported"
    CONSUMER_CONFIG = "a consumer's settings are not valid"
    SCHEMA = "there is no schema registry"
    BATCH = "the list of records cannot be used as a whole"
    CLUSTER = "the cluster does not exist"


class RestError(Exception):
    """An error with everything that its answer needs (RFC 9110 section 15)."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        validation_errors: Sequence[str] = (),
        headers: Sequence[tuple[str, str]] = (),
        close: bool = False,
        fault: Fault | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status  # the HTTP status, which is also the `error_code` of the body
        self.message = _shown(message)  # one line for the client, without secrets
        # violations of the contract, one line each; empty for other errors
        self.validation_errors = tuple(_shown(line) for line in validation_errors)
        # further fields of the answer, such as `Allow`, `Retry-After` or `WWW-Authenticate`
        self.headers = tuple(headers)
        self.close = close  # whether to close the connection, because the rest of the request was not read
        self.fault = fault  # the cause; None where the status says enough


def is_text(field: str) -> bool:
    """Whether a header field is UTF-8; bytes that are not are lone surrogates in it."""
    return field.isascii() or field == _shown(field)


def _shown(text: str) -> str:
    """Make `text` encodable: bytes of a header field that are not UTF-8 arrive here as lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def not_found(message: str = "Not Found", fault: Fault | None = None) -> RestError:
    """404: no such path, topic, partition or consumer (RFC 9110 section 15.5.5)."""
    return RestError(404, message, fault=fault)


def invalid(*details: str, status: int = 400) -> RestError:
    """400, or the `status` that the contract says: the body or a parameter violates it; `details` name the places."""
    return RestError(status, "Validation error on: Schema validation error", validation_errors=details)


def unprocessable(message: str) -> RestError:
    """422: the request is well formed, but its content cannot be used (RFC 9110 section 15.5.21)."""
    return RestError(422, message)


def busy(message: str, *, close: bool = False) -> RestError:
    """503 with `Retry-After`: the client should retry later (RFC 9110 section 15.6.4)."""
    return RestError(503, message, headers=retry_after(503), close=close)


def too_many(
    message: str, retry_after_s: int = RETRY_AFTER_S, fields: Sequence[tuple[str, str]] = (), *, close: bool = False
) -> RestError:
    """429 with `Retry-After` and more `fields`: a limit is reached (RFC 6585 section 4)."""
    return RestError(429, message, headers=(("Retry-After", str(retry_after_s)), *fields), close=close)


def too_large(limit: int) -> RestError:
    """413: the body is longer than `limit` bytes, and is not read to its end (RFC 9110 section 15.5.14)."""
    return RestError(413, f"The request body is larger than {limit} bytes", close=True)
