"""Links out of docs/ lead to the repository, and those within stay."""

from __future__ import annotations

import pytest

from tools.site_hooks import rewritten

HOST = "https://host.example/us/trivium"


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "[m](docs/mqtt.md#wills)", "[m](mqtt.md#wills)"),
        ("README.md", "[s](SECURITY.md)", f"[s]({HOST}/blob/HEAD/SECURITY.md)"),
        ("docs/mqtt.md", "[h](http.md)", "[h](http.md)"),
        ("docs/mqtt.md", "[a](../ARCHITECTURE.md#x)", f"[a]({HOST}/blob/HEAD/ARCHITECTURE.md#x)"),
        ("docs/adr/README.md", "[r](../../README.md)", "[r](../index.md)"),
        ("docs/mqtt.md", "[gone](../absent.md)", "[gone](../absent.md)"),
        ("docs/mqtt.md", "[here](#wills)", "[here](#wills)"),
        ("docs/mqtt.md", "[web](https://a.example/b)", "[web](https://a.example/b)"),
    ],
)
def test_links(source: str, link: str, expected: str):
    assert rewritten(link, source, HOST) == expected


def test_without_a_repository_the_text_stays():
    assert rewritten("see [a](../ARCHITECTURE.md).", "docs/mqtt.md", "") == "see a."
