"""SQL conditions, regular expressions and other text that a person writes, turned into Polars expressions.

Everything here works on each row alone: an aggregate or a window would make a verdict depend on which rows happen to
share a batch. Regular expressions are Rust's: linear time whatever the text, so no pattern can hang a pass.
"""

from __future__ import annotations

import re
from typing import Annotated

import polars as pl
from pydantic import AfterValidator

_ACROSS_ROWS = (
    "AVG SUM MIN MAX COUNT FIRST LAST MEDIAN STDDEV STDEV STDDEV_SAMP STDDEV_POP STDEV_SAMP STDEV_POP VARIANCE VAR "
    "VAR_SAMP VAR_POP QUANTILE_CONT QUANTILE_DISC CORR COVAR COVAR_POP COVAR_SAMP ARRAY_AGG STRING_AGG ROW_NUMBER RANK "
    "DENSE_RANK LAG LEAD FIRST_VALUE LAST_VALUE NTH_VALUE"
)
_AGGREGATE = re.compile(rf"\b({_ACROSS_ROWS.replace(' ', '|')})\s*\(|\b(OVER)\b", re.IGNORECASE)
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"")


def refuse_aggregates(text: str) -> str:
    """`text` unchanged.

    Raises:
        ValueError: it aggregates or looks at other rows.
    """
    found = _AGGREGATE.search(_QUOTED.sub("''", text))
    if found:
        word = (found.group(1) or found.group(2)).upper()
        raise ValueError(
            f"{word} looks at other rows, but this is evaluated on each row alone: "
            "use a group operator or `sql` with `query`"
        )
    return text


def row_expression(text: str) -> pl.Expr:
    """The Polars expression of a SQL expression over the columns of one row.

    Raises:
        ValueError: it does not parse, calls an unknown function, or looks at other rows.
    """
    refuse_aggregates(text)
    try:
        return pl.sql_expr(text)
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"not a SQL expression: {error}") from error


def roots(expression: pl.Expr) -> frozenset[str]:
    """Columns that an expression reads."""
    return frozenset(expression.meta.root_names())


def group_count(pattern: str) -> int:
    """How many capture groups a pattern has.

    Raises:
        ValueError: it is not a regular expression (look-around and back-references are not supported).
    """
    try:
        groups = pl.select(pl.lit("").str.extract_groups(pattern)).to_series().struct.fields
        pl.select(pl.lit("").str.count_matches(pattern))
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return len(groups)


def _pattern(pattern: str) -> str:
    group_count(pattern)
    return pattern


def _extraction(pattern: str) -> str:
    found = group_count(pattern)
    if found != 1:
        raise ValueError(f"the pattern {pattern!r} has {found} capture groups: put exactly one around the answer")
    return pattern


Pattern = Annotated[str, AfterValidator(_pattern)]
"""A checked regular expression."""
Extraction = Annotated[str, AfterValidator(_extraction)]
"""A checked regular expression with exactly one capture group."""
RowExpression = Annotated[str, AfterValidator(lambda text: (row_expression(text), text)[1])]
"""A checked SQL expression over one row."""


def last_match(column: pl.Expr, pattern: str | None) -> pl.Expr:
    """The group of the last match of `pattern`, null where nothing matches; without a pattern the text itself."""
    if pattern is None:
        return column
    return column.str.extract_all(pattern).list.last().str.extract(pattern, 1)
