"""What can be asked for: the stored tables, which of their columns are payload, and what each view reads.

*Payload* is what grows with the length of a row: nested columns and free JSON. It stays in the store's own files and is
read where a query needs it. Everything else is *narrow* and is held by DuckDB itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

import pyarrow as pa

from buffer_engine.inspect.library import derived, views
from buffer_engine.schema import BATCH_STATE, QUARANTINE, ROLLOUT_STATE, TABLES

VOCABULARY = pa.schema([pa.field("token_id", pa.int32(), nullable=False), pa.field("text", pa.string())])
"""Texts of token ids, for `tokens.token_text`."""

STATES: Mapping[str, pa.Schema] = {
    "rollout_state": ROLLOUT_STATE,
    "batch_state": BATCH_STATE,
    "quarantine": QUARANTINE,
    "vocabulary": VOCABULARY,
}
"""Relations that are read anew at every version; the others only grow."""

RELATIONS: Mapping[str, pa.Schema] = {**{name: spec.schema for name, spec in TABLES.items()}, **STATES}
"""Every relation of schema `raw`."""

ORDERED = ("scores", "decisions", "metrics", "events")
"""Tables that carry `row_order`, their order of commit, where views must know which of two rows came later."""

COUNTED = ("token_count", "total_tokens")
"""Columns beside the narrow ones of `rollouts`: sampled tokens and all tokens, counted once."""

_WORD = re.compile(r"[a-z_]+")
_ASKED_BY_NAME = re.compile(r"\bquery(_table)?\b")


def _is_payload(table: str, field: pa.Field) -> bool:
    return pa.types.is_nested(field.type) or (table in ("rollouts", "tasks") and field.name == "info_json")


PAYLOAD: Mapping[str, tuple[str, ...]] = {
    name: columns
    for name, spec in TABLES.items()
    if (columns := tuple(field.name for field in spec.schema if _is_payload(name, field)))
}
"""Payload columns of the tables that have any."""

PAYLOAD_NAMES = frozenset(column for columns in PAYLOAD.values() for column in columns)


def narrow_columns(table: str) -> list[str]:
    """The stored columns of a relation that are no payload."""
    return [name for name in RELATIONS[table].names if name not in PAYLOAD.get(table, ())]


def read_by(sql: str) -> frozenset[str]:
    """Relations, derived ones included, that a query may read; rather one too many than one too few.

    Any word of the text that is a name counts. A name that is only put together while the query runs
    (`query_table('sco' || 'res')`) cannot be seen, so then all of them count.
    """
    words = set(_WORD.findall(sql.lower()))
    if _ASKED_BY_NAME.search(sql.lower()):
        return frozenset(RELATIONS) | frozenset(derived())
    found: set[str] = set()
    for word in words & _dependencies().keys():
        found |= _dependencies()[word]
    return frozenset(found)


@cache
def _dependencies() -> Mapping[str, frozenset[str]]:
    """For every name that a query may write, the relations behind it."""
    texts = {name: [text.sql] for name, text in views().items()}
    for name, text in derived().items():
        texts.setdefault(name, []).append(text.sql)
    known: dict[str, frozenset[str]] = {}

    def behind(name: str, above: frozenset[str]) -> frozenset[str]:
        if name in known:
            return known[name]
        found = {name} & (RELATIONS.keys() | derived().keys())
        for sql in texts.get(name, ()):
            for word in set(_WORD.findall(sql)) & (RELATIONS.keys() | texts.keys()) - above:
                found |= behind(word, above | {word})
        return frozenset(found)

    for name in sorted(RELATIONS.keys() | texts.keys()):
        known[name] = behind(name, frozenset({name}))
    return known
