"""A read of `format("kvstore")` with filters that reach the source: `read_where`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import and_, or_
from typing import Any
from uuid import UUID

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it

from spark_connector.access import Access, Address
from spark_connector.filters import Comparison, checked, to_text
from spark_connector.loading.columns import quoted
from spark_connector.releases import SOURCES, require


def read_where(
    spark: SparkSession, source: Address, filters: Iterable[Any], **options: object
) -> DataFrame:
    """The rows of `source` for which the filters hold; tasks read their keys alone.

    `filters` is a list of comparisons `(column, operator, value)` that must all hold, or a list of
    such lists, one of which must hold. The operators are `=`, `<`, `<=`, `>`, `>=`, `in` and
    `startswith`. Values are Python's, at most 10,000 in all filters together.

        read_where(spark, "copy", [("key", "startswith", b"user/")])
        read_where(spark, "copy", [("vendor", "in", ["A", "B"]), ("trip", ">", 40)], table="trips")

    Of a store, comparisons of `key` narrow the read. Of a table, comparisons of the first columns
    of its key do: equalities and `in`, and a range or the beginning of a text in the column behind
    them. Otherwise comparisons of the first columns of an index do: the driver reads the entries
    of at most 10,000 rows. Comparisons of other columns are applied to the rows that are read.

    `options` are the options of the format, under their names: `versionAsOf=stamp`. The frame has
    the same rows as `spark.read.format("kvstore")` with a `where`, and can be filtered further.
    Raises `UsageError` for filters of another form. Costs nothing before the first query.
    """
    require(SOURCES, "read_where")
    access, found = Access.of(source), checked(filters)
    texts = {name: str(value) for name, value in options.items()}
    reader = spark.read.format("kvstore").options(**access.as_options(), **texts)
    rows = reader.option("filters", to_text(found)).load(access.url)
    return rows.where(reduce(or_, (reduce(and_, map(_condition, group)) for group in found)))


def _condition(each: Comparison) -> Column:
    column = F.col(quoted(each.column))
    if each.operator == "in":
        return column.isin(*map(_of_spark, each.value)) if each.value else F.lit(False)
    value = F.lit(_of_spark(each.value))
    if each.operator == "startswith":
        return column.startswith(value)
    compared: dict[str, Any] = {
        "=": Column.__eq__,
        "<": Column.__lt__,
        "<=": Column.__le__,
        ">": Column.__gt__,
        ">=": Column.__ge__,
    }
    condition: Column = compared[each.operator](column, value)
    return condition


def _of_spark(value: Any) -> Any:
    return value.bytes if isinstance(value, UUID) else value
