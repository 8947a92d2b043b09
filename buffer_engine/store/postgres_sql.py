"""The store's SQL as PostgreSQL understands it: a translation of the subset that the store's modules write.

Explicit rules rather than a parser: the subset is small, a rule is one line, and what no rule knows reaches the server
unchanged, where it fails loudly. Text is compared byte by byte as in SQLite, hence the collation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from buffer_engine.store.ddl import catalog_ddl

_PIECES = re.compile(r"'(?:[^']|'')*'|\?|::|:[A-Za-z_]\w*|[^'?:]+|:")
_TYPES = {"INTEGER": "BIGINT", "REAL": "DOUBLE PRECISION", "BLOB": "BYTEA", "TEXT": 'TEXT COLLATE "C"'}
_TABLES = (
    "(SELECT 'table' AS type, tablename AS name FROM pg_catalog.pg_tables WHERE schemaname = current_schema()) "
    "AS sqlite_master"
)
_TRIGGER = re.compile(
    r"CREATE TRIGGER IF NOT EXISTS (?P<name>\w+) (?P<when>AFTER .+?) ON (?P<table>\w+)\s+"
    r"WHEN (?P<condition>.+?) BEGIN(?P<body>.+)END\s*;?\s*$",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Statement:
    """A translated statement.

    Attributes:
        sql: text with `$1`, `$2` … in the place of values.
        names: names of the values in that order; empty when they are given by position.
        replaces: table of an `INSERT OR REPLACE`, whose conflict clause depends on the table's key.
    """

    sql: str
    names: tuple[str, ...] = ()
    replaces: str | None = None

    def arrange(self, parameters: Sequence[Any] | Mapping[str, Any]) -> Sequence[Any]:
        """Values in the order of the placeholders."""
        if isinstance(parameters, Mapping):
            return [parameters[name] for name in self.names]
        return parameters


@cache
def translate(sql: str) -> Statement | None:
    """The statement for PostgreSQL; None when it says something to SQLite alone and nothing is to be done."""
    text = sql.strip().rstrip(";")
    if re.match(r"PRAGMA cache_size\b", text):
        return None
    if text.startswith("CREATE TRIGGER"):
        return Statement(_trigger(text))
    replaces = re.match(r"INSERT OR REPLACE INTO (\w+)", text)
    if re.match(r"CREATE (TABLE|INDEX|UNIQUE INDEX)|ALTER TABLE", text):
        text = _definition(text)
    text = _rewrite(text)
    names: list[str] = []
    text = _pieces(text, lambda piece: _placeholder(piece, names))
    count = 0

    def number(_: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return f"${count}"

    text = re.sub("\x00", number, text)
    return Statement(text, tuple(names), replaces.group(1) if replaces else None)


def conflict_clause(columns: Sequence[str], key: Sequence[str]) -> str:
    """What makes an INSERT replace the row with the same key, as `INSERT OR REPLACE` does."""
    rest = [name for name in columns if name not in key]
    target = ", ".join(f'"{name}"' for name in key)
    if not rest:
        return f" ON CONFLICT ({target}) DO NOTHING"
    return f" ON CONFLICT ({target}) DO UPDATE SET " + ", ".join(f'"{name}" = excluded."{name}"' for name in rest)


def _placeholder(piece: str, names: list[str]) -> str:
    if piece == "?":
        return "\x00"
    if re.fullmatch(r":\w+", piece):
        name = piece[1:]
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}"
    return piece


def _pieces(sql: str, change: Callable[[str], str]) -> str:
    """`sql` with every placeholder and stretch of text outside of literals changed."""
    return "".join(piece if piece.startswith("'") else change(piece) for piece in _PIECES.findall(sql))


def _rewrite(sql: str) -> str:
    """Everything but placeholders."""
    sql = _json(sql)
    ignores = "INSERT OR IGNORE" in sql
    sql = re.sub(r"INSERT OR (IGNORE|REPLACE) INTO", "INSERT INTO", sql)
    sql = re.sub(r"\sINDEXED BY \w+", "", sql)
    sql = re.sub(r"\bCROSS JOIN (\w+ \w+|\w+)(\s+)ON\b", r"JOIN \1\2ON", sql)
    # the server asks for a type where a value that may be null is compared with nothing
    sql = re.sub(r"(?<![\w.])(:\w+|\?) IS (NOT )?NULL\b", r"CAST(\1 AS TEXT) IS \2NULL", sql)
    sql = re.sub(r"\bIS NOT (?!NULL\b|DISTINCT\b|TRUE\b|FALSE\b)", "IS DISTINCT FROM ", sql)
    sql = re.sub(r"\bIS (?!NOT\b|NULL\b|DISTINCT\b|TRUE\b|FALSE\b)", "IS NOT DISTINCT FROM ", sql)
    sql = re.sub(r"\bsqlite_master\b", _TABLES, sql)
    sql = re.sub(r"\bCAST\((.+?) AS INTEGER\)", r"CAST(\1 AS BIGINT)", sql)
    # a column here, a keyword there
    sql = re.sub(r"(?<![\w.\"])offset\b(?!\")", '"offset"', sql)
    return sql + " ON CONFLICT DO NOTHING" if ignores else sql


def _json(sql: str) -> str:
    """JSON lists as relations with a column `value`; numbers where the other side of a comparison is a number."""

    def listed(match: re.Match[str]) -> str:
        return f"jsonb_array_elements_text(CAST(? AS jsonb)) AS {match.group(1) or 'json_each'}(value)"

    def member(match: re.Match[str]) -> str:
        column, kind = match.group(1), "::bigint" if _is_integer(match.group(1)) else ""
        return f"{column} IN (SELECT value{kind} FROM json_each(?)"

    def element(match: re.Match[str]) -> str:
        column, path, at = match.group(1), match.group(2), match.group(3)
        return f"{column} = ({path}::jsonb ->> {at}){'::bigint' if _is_integer(column) else ''}"

    def same(match: re.Match[str]) -> str:
        return f"{match.group(1)} = {match.group(2)}{'::bigint' if _is_integer(match.group(1)) else ''}"

    sql = re.sub(r"([\w.]+) IN \(SELECT value FROM json_each\(\?\)", member, sql)
    sql = re.sub(r"([\w.]+) = json_extract\(([\w.]+), '\$\[(\d+)\]'\)", element, sql)
    sql = re.sub(r"([\w.]+) = (k\.value|json_each\.value)\b(?!::)", same, sql)
    sql = re.sub(r"\bjson_each\(\?\)(?: (?!CROSS|JOIN|WHERE|ORDER|GROUP|LIMIT|LEFT)(?:AS )?(\w+))?", listed, sql)
    return re.sub(r"\bjson_group_array\((\w+)\)", r"coalesce(json_agg(\1)::text, '[]')", sql)


def _definition(sql: str) -> str:
    sql = re.sub(r"\)\s*WITHOUT ROWID\s*$", ")", sql)
    sql = re.sub(r"\s+REFERENCES \w+", "", sql)  # SQLite does not enforce them unless asked
    sql = re.sub(r"\bINTEGER PRIMARY KEY( AUTOINCREMENT)?", "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY", sql)
    return _pieces(sql, lambda piece: re.sub(r"\b(INTEGER|REAL|BLOB|TEXT)\b", lambda kind: _TYPES[kind[1]], piece))


def _trigger(sql: str) -> str:
    found = _TRIGGER.match(sql)
    if found is None:
        raise ValueError(f"a trigger that cannot be translated: {sql}")
    body = "; ".join(_rewrite(part.strip()) for part in found["body"].split(";") if part.strip())
    name = found["name"]
    return (
        f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $body$ BEGIN {body}; RETURN NULL; "
        f"END $body$; DROP TRIGGER IF EXISTS {name} ON {found['table']}; "
        f"CREATE TRIGGER {name} {found['when']} ON {found['table']} FOR EACH ROW "
        f"WHEN ({_rewrite(found['condition'])}) EXECUTE FUNCTION {name}()"
    )


@cache
def _integer_columns() -> frozenset[str]:
    """Names of columns that are whole numbers wherever they occur in the catalog."""
    columns = re.findall(r"[(,\n]\s*(\w+) (INTEGER|TEXT|REAL|BLOB)\b", "\n".join(catalog_ddl()))
    other = {name for name, kind in columns if kind != "INTEGER"}
    return frozenset({name for name, kind in columns if kind == "INTEGER"} - other)


def _is_integer(column: str) -> bool:
    return column.rpartition(".")[2] in _integer_columns()
