"""The archive readers with which the proofs check their results."""

from __future__ import annotations

import duckdb

from loadtest.spark.lakes import COUNT, Found

GROWING = "SELECT 0 AS partition, unnest(range(10 * nextval('looks'))) AS \"offset\""


def test_a_batch_written_during_a_read_is_not_reported_missing() -> None:
    with duckdb.connect() as connection:
        connection.sql("CREATE SEQUENCE looks")
        found = Found(*connection.sql(COUNT.format(rows=f"({GROWING})")).fetchall()[0])
    assert found == Found(10, 10, 10)
    assert found.right
