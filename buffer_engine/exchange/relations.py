"""What leaves a store: tables, views and queries, all read at one version and batch by batch."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import pyarrow as pa

from buffer_engine.errors import StoreError, UsageError, did_you_mean
from buffer_engine.inspect import Inspection, connect_store, views
from buffer_engine.schema import TABLES
from buffer_engine.store.base import ExperienceStore
from buffer_engine.store.reading import schema_of, wanted_columns
from buffer_engine.store.validate import table_spec

FETCHED_ROWS = 1024
"""Rollouts read at once when a condition picks them."""


@dataclass(frozen=True, slots=True)
class Selection:
    """One relation to write.

    Attributes:
        name: name of its files: the table, the view, or what the query is to be called.
        kind: a table comes in the order of commit with the types of the schema; a view or query as DuckDB gives it.
        query: the SELECT of a query.
        where: SQL condition. On the table `rollouts` it is about columns of the view `experiences` (`reward = 1`), on
            any other table or view about its own.
        columns: only these, in this order; None: all.
    """

    name: str
    kind: Literal["table", "view", "query"]
    query: str = ""
    where: str | None = None
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Relation:
    """An opened selection; `rows` is how many will come, None when that is not known before."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    rows: int | None = None


class Extraction:
    """Reads selections of one store as of one version, whatever is appended meanwhile."""

    def __init__(self, store: ExperienceStore, *, until: int | None = None) -> None:
        """As of version `until` (None: now).

        Raises:
            StoreError: `until` lies in the future.
        """
        now = store.version()
        if until is not None and until > now:
            raise StoreError(f"{store.path}: version {until} does not exist yet; the newest is {now}")
        self.store = store
        self.version = now if until is None else until
        self._newest = self.version == now
        self._inspection: Inspection | None = None

    @property
    def inspection(self) -> Inspection:
        """SQL over the version."""
        if self._inspection is None:
            self._inspection = connect_store(self.store, until=self.version)
        return self._inspection

    @contextmanager
    def open(self, selection: Selection) -> Generator[Relation]:
        """Read a selection; no other one may be read inside the block.

        Raises:
            SchemaError: a table has no such column.
            QueryError: the condition or the query cannot run.
            UsageError: there is no such view.
        """
        if selection.kind == "table":
            spec = table_spec(selection.name)
            schema = schema_of(spec, wanted_columns(spec, selection.columns))
            if selection.where is None:
                batches = self.store.scan(selection.name, until=self.version, columns=selection.columns)
                rows = self.store.info().rows.get(selection.name, 0) if self._newest else None
                yield Relation(schema, batches, rows)
                return
            if selection.name == "rollouts":
                ids = self.ids_where(selection.where)
                yield Relation(schema, self.rollouts(ids, selection.columns), len(ids))
                return
            text = f"SELECT {_listed(schema.names)} FROM raw.{_quoted(selection.name)}{_where(selection.where)}"
            with self.inspection.stream(text) as reader:
                yield Relation(schema, (batch.cast(schema) for batch in reader))
            return
        if selection.kind == "view" and selection.name not in views():
            raise UsageError(f"there is no view {selection.name!r}: {did_you_mean(selection.name, views())}")
        source = _quoted(selection.name) if selection.kind == "view" else f"(\n{selection.query}\n)"
        what = "*" if selection.columns is None else _listed(selection.columns)
        with self.inspection.stream(f"SELECT {what} FROM {source}{_where(selection.where)}") as reader:
            yield Relation(reader.schema, iter(reader))

    def ids_where(self, where: str) -> list[str]:
        """Ids of the rollouts for which a condition over the view `experiences` holds, in order of arrival."""
        found = self.inspection.query(f"SELECT experience_id FROM experiences{_where(where)} ORDER BY sequence")
        return found.column("experience_id").to_pylist()

    def rollouts(self, ids: list[str], columns: tuple[str, ...] | None) -> Iterator[pa.RecordBatch]:
        """These rollouts, in this order."""
        for at in range(0, len(ids), FETCHED_ROWS):
            yield from self.store.fetch(ids[at : at + FETCHED_ROWS], columns=columns).to_batches()

    def close(self) -> None:
        """Let go of the SQL connection; the store stays open."""
        if self._inspection is not None:
            self._inspection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def every_table() -> list[Selection]:
    """All stored tables."""
    return [Selection(name, "table") for name in TABLES]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(_quoted(name) for name in names)


def _where(condition: str | None) -> str:
    # on lines of its own, so that a comment at its end hides nothing
    return "" if condition is None else f" WHERE (\n{condition}\n)"
