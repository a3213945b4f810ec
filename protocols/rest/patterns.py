"""Regular expressions that clients send: matched in linear time, so that none of them can stop the gateway."""

from __future__ import annotations

from typing import Final

import jsonschema_rs

from protocols.rest.errors import unprocessable

_OPTIONS: Final = jsonschema_rs.RegexOptions()  # finite automata, of bounded size


class TopicPattern:
    """A regular expression that fits whole names of topics, without look-around and back-references."""

    def __init__(self, text: str) -> None:
        """Compile `text`; RestError: 422, it is no such expression."""
        self.text = text
        try:
            self._matcher = jsonschema_rs.Draft202012Validator(
                {"pattern": f"^(?:{text})$"}, pattern_options=_OPTIONS, validate_formats=False
            )
        except ValueError as error:
            raise unprocessable("The topic_pattern is no regular expression that is served") from error

    def matches(self, topic: str) -> bool:
        """Whether it fits the whole name."""
        return self._matcher.is_valid(topic)
