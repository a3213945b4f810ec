"""The archive readers with which the proofs check their results."""

from __future__ import annotations

import duckdb

from loadtest.spark.lakes import COUNT, Found

GROWING = "SELECT 0 AS partition, unnest(range(10 * nextval('looks'))) AS \"offset\""


def test_a_batch_that_comes_while_a_reader_looks_is_no_batch_that_is_missing() -> None:
    with duckdb.connect() as connection:
        connection.sql("CREATE SEQUENCE looks")
        found = Found(*connection.sql(COUNT.format(rows=f"({GROWING})")).fetchall()[0])
    assert found == Found(10, 10, 10)
    assert found.right
