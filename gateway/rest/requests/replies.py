"""The answers to this process's requests to devices: one key of the reply topic, read as it grows.

The address is `<http.reply_topic>/<a name that nobody can guess>`. Whoever may publish there can answer, over every
protocol and at every gateway. Which question an answer is for, its correlation id says; that cannot be guessed either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Final

from gateway.kafka.contracts import Subscriber
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.read.lingering import LingeringWatch
from gateway.kafka.read.live_reader import LiveReader
from mapping.record import Received
from mapping.rest_requests import correlation_of

LINGER_S: Final = 30.0  # so long the topic is read on behind the last question: late answers are counted


class Question:
    """One request that waits for its answer."""

    __slots__ = ("answer", "correlation_id")

    def __init__(self, correlation_id: str, answer: asyncio.Future[Received]) -> None:
        self.correlation_id = correlation_id  # what the answer must bring
        self.answer = answer  # done with the answer


class Replies:
    """All open questions of the process; the `Fanout` of the reply topic."""

    def __init__(self, live_reader: LiveReader, publisher: Publisher, topic: str, random_id: Callable[[], str]) -> None:
        """Read the reply topic from the first question on.

        `random_id` gives a new id that cannot be guessed, legal in an MQTT topic.
        """
        self.topic = topic
        name = f"http-{random_id()}"
        self.address = f"{topic}/{name}"  # where answers go
        self.late = 0  # how many answers came that nobody waited for
        self._key = name.encode()
        self._publisher = publisher
        self._random_id = random_id
        self._open: dict[str, Question] = {}
        self._users = 0
        self._watch = LingeringWatch(live_reader, topic, self, lambda: self._users, linger_s=LINGER_S)

    def __len__(self) -> int:
        """How many questions are open."""
        return len(self._open)

    def select(self, record: Received) -> Collection[tuple[Subscriber, None]]:
        """Give an answer to its question; there is no subscriber to offer it to (`contracts.Fanout`)."""
        if record.key == self._key:
            question = self._open.pop(correlation_of(record) or "", None)
            if question is None:
                self.late += 1
            elif not question.answer.done():
                question.answer.set_result(record)
        return ()

    @contextmanager
    def ask(self) -> Iterator[Question]:
        """Open a question for the time of the block. Its answer is seen if `listen` was awaited before it is sent."""
        question = Question(self._random_id(), asyncio.get_running_loop().create_future())
        self._open[question.correlation_id] = question
        self._users += 1
        try:
            yield question
        finally:
            self._open.pop(question.correlation_id, None)
            question.answer.cancel()
            self._users -= 1
            if not self._users:
                self._watch.release()

    async def listen(self) -> None:
        """Be sure that what is stored from now on is seen.

        Raises:
            Refused: the reply topic is not there and may not be made, or Kafka does not answer.
        """
        if not self._watch.held:
            await self._publisher.topic(self.topic)
            await self._watch.hold()

    def close(self) -> None:
        """Watch the reply topic no more."""
        self._watch.close()
