"""Files to import: which there are, which table each belongs to, and their rows with where each stands."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq
from ruamel.yaml import YAML, YAMLError

from buffer_engine.errors import ExchangeError, UsageError, did_you_mean
from buffer_engine.exchange.json_rows import Bad, JsonRows
from buffer_engine.schema import TABLES, TableSpec
from buffer_engine.store.validate import table_spec

RowFormat = Literal["parquet", "jsonl", "hf"]
CHUNK_ROWS = 1024
_SUFFIX = {".parquet": "parquet", ".jsonl": "jsonl", ".arrow": "arrow"}
_PART = re.compile(r"(?P<name>.+?)-\d{5}(-of-\d{5})?$")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of a file.

    Attributes:
        rows: columns as the file has them.
        place: where the row at a position stands: `file:line` or `file row n`.
        bad: rows that could not even be read.
    """

    rows: pa.Table
    place: Callable[[int], str]
    bad: tuple[Bad, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of rows of one table."""

    path: Path
    table: str

    @property
    def spec(self) -> TableSpec:
        """The table that it is to become part of."""
        return TABLES[self.table]

    def digest(self) -> str:
        """Hash of the file's bytes, 32 hexadecimal digits."""
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]

    def rows(self) -> int | None:
        """How many rows it says it has; None when only reading it tells."""
        return _parquet(self.path).metadata.num_rows if self.path.suffix == ".parquet" else None

    def chunks(self) -> Iterator[Chunk]:
        """All rows, `CHUNK_ROWS` at most at a time.

        Raises:
            ExchangeError: the file cannot be read.
        """
        if self.path.suffix == ".jsonl":
            for part in JsonRows(self.path, self.spec).chunks(CHUNK_ROWS):
                yield Chunk(part.rows, part.places.__getitem__, part.bad)
            return
        batches = _parquet(self.path).iter_batches(CHUNK_ROWS) if self.path.suffix == ".parquet" else _arrow(self.path)
        first = 0
        for batch in batches:
            for at in range(0, batch.num_rows, CHUNK_ROWS):
                rows = pa.Table.from_batches([batch.slice(at, CHUNK_ROWS)])
                yield Chunk(rows, _row_namer(self.path, first))
                first += rows.num_rows


def find_files(source: Path, *, format: RowFormat | None, tables: Sequence[str]) -> list[SourceFile]:
    """The files of a source, tables that others refer to first.

    Args:
        source: a file, or a folder of files `<table>-00000.parquet`, of the same in JSONL, or a dataset of the Hugging
            Face library (README.md with configurations, or written by its save_to_disk).
        format: look only for files of this kind; None: by what is there.
        tables: of several tables only these (empty: all); a single one is also what files belong to that do not say it.
    Raises:
        UsageError: nothing is there, or nothing says which table a file belongs to.
    """
    for name in tables:
        table_spec(name)
    table = tables[0] if len(tables) == 1 else None
    if source.is_file():
        kind = _SUFFIX.get(source.suffix)
        if kind is None or (format not in (None, "hf") and kind != format):
            raise UsageError(
                f"{source}: not a file of format {format or 'parquet or jsonl'}; name another, or --format"
            )
        return [SourceFile(source, table or _table_of(source, None))]
    if not source.is_dir():
        raise UsageError(f"{source}: there is nothing here; name a file or a folder")
    if (source / "manifest.json").is_file():  # the export of a whole store, of which single tables are taken
        source = source / "tables"
    named = _configured(source) if format in (None, "hf") else None
    if named is None:
        wanted = {None: tuple(_SUFFIX), "hf": (".arrow", ".parquet"), "parquet": (".parquet",), "jsonl": (".jsonl",)}
        paths = sorted(
            path for path in source.rglob("*") if path.suffix in wanted[format] and not path.name.startswith(".")
        )
        if table is not None and len({_stem(path) for path in paths} & set(TABLES)) == 0:
            named = [(path, table) for path in paths]
        else:
            named = [(path, None) for path in paths]
    files = [SourceFile(path, _table_of(path, name)) for path, name in named if path.stat().st_size]
    if tables:
        files = [file for file in files if file.table in tables]
    if not files:
        said = f" of table {' or '.join(tables)}" if tables else ""
        raise UsageError(f"{source}: no {format or 'Parquet, JSONL or Arrow'} files{said} here; name another folder")
    order = ["media", *(name for name in TABLES if name != "media")]
    return sorted(files, key=lambda file: (order.index(file.table), str(file.path)))


def _configured(source: Path) -> list[tuple[Path, str | None]] | None:
    """Files and names of the configurations in a dataset card; None when there is none."""
    card = source / "README.md"
    if not card.is_file():
        return None
    text = card.read_text(encoding="utf-8")
    if not text.startswith("---\n") or "\n---" not in text[4:]:
        return None
    try:
        head: object = YAML(typ="safe").load(text[4 : text.index("\n---", 4)])
    except YAMLError as error:
        raise ExchangeError(f"{card}: the YAML at its head cannot be read ({error})") from error
    configs = cast("dict[str, Any]", head).get("configs") if isinstance(head, dict) else None
    if not configs:
        return None
    found: list[tuple[Path, str | None]] = []
    for config in configs:
        for entry in config["data_files"]:
            patterns = [entry["path"]] if isinstance(entry["path"], str) else entry["path"]
            for pattern in patterns:
                paths = sorted(source.glob(pattern))
                if not paths:
                    raise ExchangeError(f"{card}: names {pattern!r}, and there is no such file")
                found += [(path, config["config_name"]) for path in paths]
    return found


def _stem(path: Path) -> str:
    found = _PART.match(path.stem)
    return found["name"] if found else path.stem


def _table_of(path: Path, config: str | None) -> str:
    """The table of a file: by its configuration, what is written in it, its name, its folder, its columns."""
    schema = _schema(path)
    written = (schema.metadata or {}).get(b"table", b"").decode() if schema is not None else ""
    for name in (config, written, _stem(path), path.parent.name):
        if name in TABLES:
            return name
    columns = _first_keys(path) if schema is None else schema.names
    fitting = [
        spec.name
        for spec in TABLES.values()
        if set(columns) <= set(spec.schema.names)
        and all(field.nullable or field.name in columns for field in spec.schema)
    ]
    if len(fitting) == 1:
        return fitting[0]
    if {"messages", "conversations"} & set(columns) or {"prompt", "response"} <= set(columns):
        raise UsageError(
            f"{path}: these are dialogues, not rows of a store: they have to be tokenised first, which a run does with "
            "`imports:` in its specification"
        )
    hint = did_you_mean(_stem(path), TABLES)
    raise UsageError(f"{path}: nothing says which table these rows belong to ({hint}); add --table NAME")


def _schema(path: Path) -> pa.Schema | None:
    if path.suffix == ".parquet":
        return _parquet(path).schema_arrow
    return _opened_arrow(path).schema if path.suffix == ".arrow" else None


def _first_keys(path: Path) -> Sequence[str]:
    rows = JsonRows(path, None)
    return rows.first_keys()


def _parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise ExchangeError(f"{path}: cannot be read as Parquet: {error}") from error


def _arrow(path: Path) -> Iterator[pa.RecordBatch]:
    yield from _opened_arrow(path)


def _opened_arrow(path: Path) -> pa.RecordBatchReader:
    try:
        return pa.ipc.open_stream(pa.memory_map(str(path)))
    except (OSError, pa.ArrowException) as error:
        raise ExchangeError(f"{path}: cannot be read as an Arrow stream: {error}") from error


def _row_namer(path: Path, first: int) -> Callable[[int], str]:
    return lambda at: f"{path} row {first + at}"
