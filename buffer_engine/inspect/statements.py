"""What a query may be, and how its failure is told.

Reading is all that inspection does. DuckDB's own parser says what kind of statement a text is, so no pattern has to
guess; the connection besides opens a read-only transaction and has no access to files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import duckdb

from buffer_engine.errors import UsageError, did_you_mean
from buffer_engine.inspect.relations import PAYLOAD_NAMES

READS = "SELECT, WITH, FROM, VALUES, DESCRIBE, SHOW, SUMMARIZE, PIVOT, UNPIVOT and EXPLAIN"

PAYLOAD_SCANS = ("PYTHON_ARROW_SCAN", "READ_PARQUET")
"""Names in DuckDB's plans for what reads outside of its own tables."""

_WORD = re.compile(r"\w+")
_UNKNOWN_TABLE = re.compile(r"Table with name (?P<name>.+?) does not exist", re.DOTALL)
_SUGGESTION = re.compile(r"\n?Did you mean .*", re.DOTALL)
_POSITION = re.compile(r"\n\nLINE \d+:.*", re.DOTALL)


class QueryError(UsageError):
    """A query cannot run: it is not a read, names something unknown, or is not valid SQL."""

    @classmethod
    def not_a_read(cls, kind: str) -> QueryError:
        """The refusal of a statement that would change something or reach outside."""
        return cls(
            f"{kind} is refused: a store is only read here ({READS}); to keep a result use --format and --output"
        )

    @classmethod
    def from_duckdb(cls, error: duckdb.Error, names: Iterable[str]) -> QueryError:
        """DuckDB's message with candidates from our own views instead of the engine's internal tables."""
        text = str(error)
        unknown = _UNKNOWN_TABLE.search(text)
        if unknown is not None:
            known = sorted(names)
            wanted = unknown["name"].strip('"')
            hint = did_you_mean(wanted, known)
            listing = "" if hint.startswith("known: ") else "; views: " + ", ".join(known)
            position = _POSITION.search(text)
            where = position.group(0) if position is not None else ""
            return cls(f"no view or table named {wanted!r}: {hint}{listing}{where}")
        if "file system operations are disabled" in text:
            return cls(
                f"{_SUGGESTION.sub('', text)}: a query sees the store's views only; "
                "read other files with DuckDB itself and join exported results there"
            )
        return cls(text)


def require_read(connection: duckdb.DuckDBPyConnection, sql: str, names: Iterable[str]) -> None:
    """Refuse everything but one reading statement.

    Raises:
        QueryError: the text is empty, cannot be parsed, holds several statements, or one that does not only read.
    """
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise QueryError.from_duckdb(error, names) from error
    if not statements:
        raise QueryError("the query is empty: write for instance SELECT * FROM runs")
    for statement in statements:
        kind = statement.type
        # MULTI is what PIVOT parses to: a temporary type, the query, and the type's end.
        if kind not in (
            duckdb.StatementType.SELECT,
            duckdb.StatementType.EXPLAIN,
            duckdb.StatementType.MULTI,
        ):
            raise QueryError.not_a_read(kind.name.replace("_", " "))
    if len(statements) > 1:
        raise QueryError(f"{len(statements)} statements in one query: send them one at a time")


def searches_in(sql: str) -> list[str]:
    """What every `search('…')` of a statement looks for.

    Raises:
        QueryError: a search is not given as plain text, so it could not be made before the query runs.
    """
    if "search" not in sql.lower():
        return []
    tokens = [(place, kind) for place, kind in duckdb.tokenize(sql) if kind != duckdb.token_type.comment]
    ends = [place for place, _ in tokens[1:]] + [len(sql.encode())]
    words = [(sql.encode()[place:end].decode().strip(), kind) for (place, kind), end in zip(tokens, ends, strict=True)]
    found: list[str] = []
    for (name, _), (bracket, _), (literal, kind) in zip(words, words[1:], words[2:], strict=False):
        if name.lower() == "search" and bracket == "(":
            if kind != duckdb.token_type.string_const or not literal.startswith("'"):
                raise QueryError("search() needs what to look for as plain text in single quotes: search('words')")
            found.append(literal[1:-1].replace("''", "'"))
    return found


def reads_payload(
    connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[object] | Mapping[str, object] | None
) -> bool:
    """Whether DuckDB's own plan of a statement reads a payload column.

    What cannot be planned by itself (EXPLAIN, PIVOT, a mistake) counts as reading: running it says more.
    """
    try:
        [(_, plan)] = connection.execute(f"EXPLAIN (FORMAT json) {sql}", parameters).fetchall()
    except duckdb.Error:
        return True
    scans = (node for root in json.loads(plan) for node in _nodes(root) if node["name"] in PAYLOAD_SCANS)
    return any(set(_WORD.findall(json.dumps(scan["extra_info"]))) & PAYLOAD_NAMES for scan in scans)


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node["children"]:
        yield from _nodes(child)
