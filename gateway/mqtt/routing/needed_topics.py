"""Finds the Kafka topics that topic filters need."""

from __future__ import annotations

from collections.abc import Collection

from gateway.kafka.cluster.topics import Topics
from gateway.kafka.contracts import Refused
from mapping.outcomes import Outcome
from mapping.rules import Rules


async def needed_topics(
    filters: Collection[str], rules: Rules, topics: Topics, *, following: bool = False
) -> dict[str, set[str] | Refused]:
    """Return the existing Kafka topics that may hold messages for each filter, with at most one request to Kafka.

    No topic is created for a filter; a missing one is left out until it appears. Kafka is asked because existing topics
    are read from their end, later ones from their beginning. `following`: a subscription to all topics exists already,
    so the known topics are current, except for a few seconds.

    Returns:
        By filter: its topics, or Refused if clients must not read the filter's topic.

    Raises:
        Refused: BUSY, if Kafka does not answer.
    """
    fixed = {topic_filter: rules.fixed_topics(topic_filter) for topic_filter in filters}
    literal = {topic_filter: rules.literal_topics(topic_filter) for topic_filter in filters}
    if not following and any(needed is None for needed in fixed.values()):
        await topics.refresh()
    refused = await topics.find(set().union(*literal.values()))
    by_filter: dict[str, set[str] | Refused] = {}
    for topic_filter, needed in fixed.items():
        # Where MQTT publishes now decides. Another place, where messages may have been stored before, need not exist.
        refusal = refused.get(literal[topic_filter][0]) if literal[topic_filter] else None
        if refusal is not None and refusal.outcome is Outcome.DENIED:
            by_filter[topic_filter] = refusal
        elif needed is None:
            by_filter[topic_filter] = rules.kafka_topics(topic_filter, topics.names)
        else:
            by_filter[topic_filter] = needed & topics.names
    return by_filter
