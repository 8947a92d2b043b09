"""`buffer-engine sql`: questions to a store, also while another process writes it."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Literal, get_args

import pyarrow as pa
import typer
from rich.table import Table

from buffer_engine.errors import UsageError, did_you_mean
from buffer_engine.inspect import Inspection, QueryError, named_queries, views
from buffer_engine.inspect.connect import query_text, search_text
from pipelines.cli.console import logs, print_text, results
from pipelines.cli.opening import Tokenizer, inspect_store, inspect_stores
from pipelines.cli.rendering import plain_value, render_result

Format = Literal["table", "csv", "json", "parquet"]
TERMINAL_ROWS = 40
LONGEST_CELL = 80


def sql(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STORE… QUERY",
            help="folders of stores, each as STORE or STORE@VERSION, then one SELECT; - reads it from standard input",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="run this named query instead")] = None,
    search: Annotated[
        str | None,
        typer.Option("--search", help="messages that hold these words instead, best first; as search('…') in a query"),
    ] = None,
    format_name: Annotated[
        str | None, typer.Option("--format", help="table | csv | json | parquet; default: by --output, else table")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the result to this file")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="list views and named queries")] = False,
    rows: Annotated[
        int | None, typer.Option("--rows", min=0, help="rows of a table to show; 0: all [default: 40 on a terminal]")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="show long values whole")] = False,
    until: Annotated[
        int | None, typer.Option("--as-of", "--until", min=0, help="as of this version of the store")
    ] = None,
    tokenizer: Tokenizer = None,
) -> None:
    """Ask SQL of a store. Reads one consistent version and disturbs no writer; nothing can be changed.

    Start with `--list`, `"FROM runs"`, `--name learning_curve` or `--search "two words"`. With several stores every
    view has a column `store`.
    """
    if list_all:
        _print_list()
        return
    if not words:
        raise UsageError('name a store: buffer-engine sql STORE "SELECT …"; --list shows what can be asked')
    stores, query = _told_apart(words, name or search)
    kind = _chosen_format(format_name, output)
    text = _chosen_query(query, name, search)
    if kind == "parquet" and output is None and sys.stdout.isatty():
        raise UsageError("Parquet is not for a terminal: add --output FILE, or send it into a pipe")
    with _inspect(stores, tokenizer=tokenizer, until=until) as inspection:
        if name is not None:
            text = inspection.named_text(name)
        if kind == "table":
            answer = inspection.query(text)
            _print_table(answer, output=output, rows=rows, full=full)
            if tokenizer is None and answer.num_rows and "token_text" in answer.column_names:
                logs.print("token_text is null without --tokenizer FOLDER (or smollm2-135m)", style="dim", markup=False)
        else:
            _write(inspection, text, kind, output)


def _told_apart(words: Sequence[str], instead: str | None) -> tuple[list[str], str | None]:
    """The stores and the query: the last of several words is the query, unless something else takes its place."""
    last = words[-1]
    named = instead is not None and last != "-" and not any(letter.isspace() for letter in last)
    if len(words) == 1 or named or _store_at(last)[1].is_dir():
        return list(words), None
    return list(words[:-1]), last


def _inspect(stores: Sequence[str], *, tokenizer: Path | None, until: int | None) -> Inspection:
    asked = [_store_at(word) for word in stores]
    if len(asked) == 1:
        [(_, folder, version)] = asked
        if until is not None and version is not None:
            raise UsageError(f"give either --as-of {until} or @{version}, not both")
        return inspect_store(folder, tokenizer=tokenizer, until=version if until is None else until)
    if until is not None:
        raise UsageError("--as-of is about one store; of several, write STORE@VERSION for each that is to be earlier")
    return inspect_stores(asked, tokenizer=tokenizer)


def _store_at(word: str) -> tuple[str, Path, int | None]:
    """What was written, the folder, and the version after `@` (a folder whose name ends like that is a folder)."""
    folder, _, version = word.rpartition("@")
    if folder and version.isdecimal() and not Path(word).exists():
        return word, Path(folder), int(version)
    return word, Path(word), None


def _chosen_format(format_name: str | None, output: Path | None) -> Format:
    known: tuple[Format, ...] = get_args(Format)
    if format_name is None:
        suffix = "table" if output is None else output.suffix.lstrip(".")
        return suffix if suffix in known else "table"
    if format_name in known:
        return format_name
    raise UsageError(f"--format {format_name!r}: {did_you_mean(format_name, known)}")


def _chosen_query(query: str | None, name: str | None, search: str | None) -> str:
    if search is not None:
        if query is not None or name is not None:
            raise UsageError(
                "--search stands alone; in a query write FROM search('words') JOIN experiences USING (experience_id)"
            )
        return search_text(search)
    if name is not None:
        if query is not None:
            raise UsageError("give either a query or --name, not both")
        return query_text(name)
    if query == "-":
        return sys.stdin.read()
    if query is None:
        raise UsageError('what should be asked? Write "SELECT …", or --name QUERY; --list shows both')
    return query


def _print_list() -> None:
    for title, found in (("views", views()), ("named queries (--name)", named_queries())):
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for entry in found.values():
            table.add_row(entry.name, entry.help)
        results.print(table)
        results.print()
    results.print("Every stored table is also there unadorned in schema raw: FROM raw.scores", markup=False)
    results.print("Messages by their words: FROM search('gradient OR \"chain rule\"')", markup=False)


def _print_table(result: pa.Table, *, output: Path | None, rows: int | None, full: bool) -> None:
    on_terminal = output is None and results.is_terminal
    # A pipe or a file gets everything: whoever reads it cannot ask for more.
    text, remarks = render_result(
        result,
        width=results.width if on_terminal else None,
        most_rows=(TERMINAL_ROWS if on_terminal else None) if rows is None else rows or None,
        longest_cell=LONGEST_CELL if on_terminal and not full else None,
    )
    if output is not None:
        _replace(output, lambda file: file.write((text + "\n").encode()))
    else:
        print_text(text)
    for remark in remarks:
        logs.print(remark, style="dim", markup=False)


def _write(inspection: Inspection, text: str, kind: Format, output: Path | None) -> None:
    """Send the result on in batches: it may be larger than memory."""
    with inspection.stream(text) as reader:
        if output is not None:
            _replace(output, lambda file: _write_batches(reader, kind, file))
        else:
            _write_batches(reader, kind, sys.stdout.buffer)
            sys.stdout.buffer.flush()


def _write_batches(reader: pa.RecordBatchReader, kind: Format, file: IO[bytes]) -> None:
    if kind == "parquet":
        import pyarrow.parquet as pq

        with pq.ParquetWriter(file, reader.schema, compression="zstd") as writer:
            for batch in reader:
                writer.write_batch(batch)
    elif kind == "csv":
        _write_csv(reader, file)
    else:
        _write_json(reader, file)


def _write_csv(reader: pa.RecordBatchReader, file: IO[bytes]) -> None:
    lines = _TextSink(file)
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(reader.schema.names)
    for batch in reader:
        # Rows one by one: nested values become JSON, which no columnar CSV writer does.
        writer.writerows([_csv_value(value) for value in row] for row in _records(batch))


def _csv_value(value: Any) -> Any:
    plain = plain_value(value)
    return json.dumps(plain, ensure_ascii=False) if isinstance(plain, dict | list | bool) else plain


def _write_json(reader: pa.RecordBatchReader, file: IO[bytes]) -> None:
    """A JSON array with one object per line, so that it can be read whole or line by line."""
    separator = b"[\n"
    names = _distinct(reader.schema.names)
    for batch in reader:
        for values in _records(batch):
            row = dict(zip(names, values, strict=True))
            file.write(separator + json.dumps(plain_value(row), ensure_ascii=False).encode("utf-8", "surrogatepass"))
            separator = b",\n"
    file.write(b"[]\n" if separator == b"[\n" else b"\n]\n")


def _records(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """Rows as tuples: two columns of one name stay two, which a dict could not keep."""
    return zip(*(column.to_pylist(maps_as_pydicts="strict") for column in batch.columns), strict=True)


def _distinct(names: Sequence[str]) -> list[str]:
    """Names with a number where one occurs again: reward, reward_1."""
    found: list[str] = []
    for name in names:
        number, fresh = 0, name
        while fresh in found:
            number += 1
            fresh = f"{name}_{number}"
        found.append(fresh)
    return found


class _TextSink:
    """What csv.writer needs of a file, over bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(text.encode("utf-8", "surrogatepass"))


def _replace(output: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file whole or not at all."""
    draft = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with open(draft, "wb") as file:
            write(file)
        os.replace(draft, output)
    except OSError as error:
        raise QueryError(f"{output}: cannot be written ({error.strerror or error})") from error
    finally:
        draft.unlink(missing_ok=True)
