"""Mapping rules that come with the gateway, by name (`mapping.presets`). Each keeps an application's order.

MQTT orders the messages of one topic name only, and Kafka those of one key. An application that orders the messages of
several topic names needs the same key for all of them.
"""

from __future__ import annotations

from typing import Final

from mapping.rules import RuleText

SPARKPLUG_TOPIC: Final = "sparkplug"

PRESETS: Final[dict[str, tuple[RuleText, ...]]] = {
    # Sparkplug 3.0 section 4.1: a host application needs a node's births, data and deaths in their order.
    "sparkplug": (
        RuleText("spBv1.0/STATE/{host}", SPARKPLUG_TOPIC, "STATE/{host}"),
        RuleText("spBv1.0/{group}/{type}/{node}/#", SPARKPLUG_TOPIC, "{group}/{node}"),
    ),
}
