"""Which Kafka topics topic filters need."""

from __future__ import annotations

from collections.abc import Collection

from gateway.kafka.cluster.topics import Topics
from gateway.kafka.contracts import Refused
from mapping.outcomes import Outcome
from mapping.rules import Rules


async def needed_topics(
    filters: Collection[str], rules: Rules, topics: Topics, *, following: bool = False
) -> dict[str, set[str] | Refused]:
    """The existing Kafka topics that may hold messages for each filter, by one question to Kafka at most.

    No topic is made for a filter: one that it names and that does not exist is left out until it appears. What exists
    by then is read from its end, what comes later from its beginning; that is why Kafka is asked. `following`: every
    topic that appears is followed already: what exists is known, but for a few seconds.

    Returns:
        By filter: its topics, or Refused where the filter's topic is not for clients.

    Raises:
        Refused: BUSY, Kafka does not answer.
    """
    fixed = {topic_filter: rules.fixed_topics(topic_filter) for topic_filter in filters}
    named: set[str] = set()
    for topic_filter in filters:
        named |= rules.literal_topics(topic_filter)
    if not following and any(needed is None for needed in fixed.values()):
        await topics.refresh()
    refused = await topics.find(named)
    found: dict[str, set[str] | Refused] = {}
    for topic_filter, needed in fixed.items():
        denied = (why for name in rules.literal_topics(topic_filter) if (why := refused.get(name)) is not None)
        refusal = next((why for why in denied if why.outcome is Outcome.DENIED), None)
        if refusal is not None:
            found[topic_filter] = refusal
        elif needed is None:
            found[topic_filter] = rules.kafka_topics(topic_filter, topics.names)
        else:
            found[topic_filter] = needed & topics.names
    return found
