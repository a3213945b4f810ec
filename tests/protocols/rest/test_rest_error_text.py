"""The text of an error can always be sent."""

from __future__ import annotations

import json

from protocols.rest.errors import RestError
from protocols.rest.responses import encode_error


def test_bytes_that_are_no_text_are_shown_and_not_sent() -> None:
    """A header field that is not UTF-8 reaches us with lone surrogates (aiohttp's surrogateescape)."""
    field = b"text/\xffplain".decode("utf-8", "surrogateescape")
    error = RestError(415, f"not served: {field}", validation_errors=(field,))
    assert json.loads(encode_error(error))["message"] == "not served: text/\\udcffplain"
