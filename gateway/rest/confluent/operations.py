"""The dialects of Confluent's REST proxy; an optional part."""

from __future__ import annotations

from gateway.rest.confluent.v2 import ConfluentV2
from gateway.rest.confluent.v3 import ConfluentV3

OPERATIONS = (ConfluentV2, ConfluentV3)
