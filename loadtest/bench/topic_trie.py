"""Time to match a topic against many subscriptions, and memory per subscription.

    python -m loadtest.bench.topic_trie [--counts 1000,10000,100000]

Topics have five levels, as in `plant/north/line-07/pump-0042/pressure`. Each kind of filter uses the wildcards in its
name; `crossed` puts `+` in random levels, so that up to 32 different filters can match a topic. The columns are the
microseconds to match a topic (mean and 99th percentile), the average number of subscriptions found, and the bytes per
subscription.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Final

from protocols.mqtt.topics import SubscriptionTrie

PLANTS, LINES, PUMPS, MEASURES = 10, 100, 1000, 5
TOPICS: Final = 2000
ROUNDS: Final = 5


def name(rng: random.Random) -> list[str]:
    """Create the levels of a random topic."""
    return [
        "plant",
        f"site-{rng.randrange(PLANTS)}",
        f"line-{rng.randrange(LINES):02}",
        f"pump-{rng.randrange(PUMPS):04}",
        f"measure-{rng.randrange(MEASURES)}",
    ]


def literal(levels: list[str], rng: random.Random) -> str:
    """Create a filter without wildcards."""
    return "/".join(levels)


def plus(levels: list[str], rng: random.Random) -> str:
    """Create a filter with `+` for the line."""
    return "/".join((*levels[:2], "+", *levels[3:]))


def rest(levels: list[str], rng: random.Random) -> str:
    """Create a filter with `#` after the device."""
    return "/".join((*levels[:4], "#"))


def mixed(levels: list[str], rng: random.Random) -> str:
    """Create a filter: half are literal, a quarter each have `+` or `#`."""
    return rng.choice((literal, literal, plus, rest))(levels, rng)


def crossed(levels: list[str], rng: random.Random) -> str:
    """Create a filter whose levels are each literal or `+`."""
    return "/".join(level if rng.random() < 0.5 else "+" for level in levels)


SHAPES: Final[dict[str, Callable[[list[str], random.Random], str]]] = {
    "literal": literal, "one +": plus, "#": rest, "mixed": mixed, "crossed": crossed,
}  # fmt: skip


def bench(shape: str, count: int) -> tuple[float, float, float, float]:
    """Return the microseconds per match, the subscriptions found, the 99th percentile, and bytes per subscription."""
    rng = random.Random(7)
    make = SHAPES[shape]
    filters = [make(name(rng), rng) for _ in range(count)]
    topics = ["/".join(name(rng)) for _ in range(TOPICS)]
    tracemalloc.start()
    trie: SubscriptionTrie[int, int] = SubscriptionTrie()
    for subscriber, topic_filter in enumerate(filters):
        trie.add(topic_filter, subscriber, 1)
    weight = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    means, tails, found = [], [], 0
    for _ in range(ROUNDS):
        took = []
        found = 0
        for topic in topics:
            began = time.perf_counter()
            matched = trie.match(topic)
            took.append(time.perf_counter() - began)
            found += len(matched)
        took.sort()
        means.append(statistics.fmean(took))
        tails.append(took[len(took) * 99 // 100])
    return min(means) * 1e6, found / len(topics), min(tails) * 1e6, weight


def main() -> None:
    """Run all measurements and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", default="1000,10000,100000")
    counts = [int(count) for count in parser.parse_args().counts.split(",")]
    print(f"{'filters':10}{'subscriptions':>14}{'match us':>10}{'found':>8}{'p99 us':>9}{'bytes/sub':>12}")
    for shape in SHAPES:
        for count in counts:
            match, found, tail, weight = bench(shape, count)
            print(f"{shape:10}{count:14,}{match:10.2f}{found:8.2f}{tail:9.2f}{weight:12.0f}")


if __name__ == "__main__":
    main()
