"""Which Kafka topics a topic filter needs."""

from __future__ import annotations

from gateway.kafka.contracts import Refused
from gateway.kafka.topics import Topics
from mapping.outcomes import Outcome
from mapping.rules import Rules


async def needed_topics(topic_filter: str, rules: Rules, topics: Topics) -> set[str]:
    """The existing Kafka topics that may hold messages for a filter.

    A topic that the filter names is created when that is allowed; when not, it is left out until it appears.

    Raises:
        Refused: the filter's topic is not for clients, or Kafka does not answer.
    """
    named = rules.literal_topics(topic_filter)
    if not named:
        await topics.refresh()  # what exists now is read from its end, what comes later from its beginning
    needed = rules.kafka_topics(topic_filter, topics.names)
    for topic in named - needed:
        try:
            await topics.get(topic)
        except Refused as refused:
            if refused.outcome is not Outcome.UNKNOWN_TOPIC:
                raise
            continue
        needed.add(topic)
    return needed
