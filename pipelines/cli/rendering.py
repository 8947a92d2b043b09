"""Query results as text: a table where it fits, one block per row where it does not.

Nothing is cut silently: whoever sees less than everything is told how much there is and how to get it. A pipe or a file
gets every table at its full width; only a terminal makes lines fold.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from pipelines.cli.console import logs, results

ROOM = 14
"""Width below which text can no longer be read; a table that cannot give it to every column becomes blocks."""

GAP = 3
"""Blanks between two columns."""


def plain_value(value: Any) -> Any:
    """A value as JSON knows it: times as ISO 8601, not-finite numbers as text, decimals as numbers."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): plain_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(part) for part in value]
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def cell_text(value: Any) -> str:
    """One value for a person; null is visible and differs from the empty text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return format(value, ".6g")
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    plain = plain_value(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ResultTable:
    """Cells as a table that fits its console: folded where it must be, in blocks where folding leaves nothing to read.

    Attributes:
        right: columns of numbers: to the right, and never folded.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[bool]

    @property
    def natural_widths(self) -> list[int]:
        """Width of each column at which nothing folds."""
        return [
            max([cell_len(name), *(cell_len(line) for row in self.rows for line in row[index].splitlines())])
            for index, name in enumerate(self.columns)
        ]

    @property
    def natural_width(self) -> int:
        """Width of the whole table at which nothing folds."""
        return sum(self.natural_widths) + GAP * max(len(self.columns) - 1, 0)

    def widths(self, width: int) -> list[int] | None:
        """Width of each column in a table of `width`; None: it cannot be made so narrow."""
        natural = self.natural_widths
        room = width - GAP * max(len(natural) - 1, 0)
        if sum(natural) <= room:
            return natural
        # An id or a number that is folded cannot be copied; text with blanks in it can still be read.
        whole = [
            at_right or not any(" " in row[index] for row in self.rows) for index, at_right in enumerate(self.right)
        ]
        for keep in (whole, self.right):
            least = [
                each if kept else max(cell_len(name), min(each, ROOM))
                for name, each, kept in zip(self.columns, natural, keep, strict=True)
            ]
            if sum(least) <= room:
                # The widest columns give way first, down to one common width.
                limit = max(natural)
                while sum(max(low, min(each, limit)) for low, each in zip(least, natural, strict=True)) > room:
                    limit -= 1
                return [max(low, min(each, limit)) for low, each in zip(least, natural, strict=True)]
        return None

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """The full width, or what there is."""
        natural = max(self.natural_width, 1)
        return Measurement(min(natural, options.max_width), min(natural, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or one block per row."""
        widths = self.widths(options.max_width)
        if widths is None:
            yield Text(blocks_text(self.columns, self.rows), overflow="fold")
            return
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for name, each, at_right in zip(self.columns, widths, self.right, strict=True):
            table.add_column(Text(name), justify="right" if at_right else "left", overflow="fold", width=each)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        yield table


def result_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> ResultTable:
    """Cells as a table; long cells wrap where the console is narrow, none is cut."""
    return ResultTable(columns, rows, right)


def records_table(records: Sequence[Mapping[str, Any]]) -> ResultTable:
    """Records with the same keys as a table; columns of numbers to the right."""
    columns = list(records[0])
    cells = [[cell_text(record[column]) for column in columns] for record in records]
    right = [
        any(isinstance(record[column], int | float) for record in records)
        and not any(isinstance(record[column], str) for record in records)
        for column in columns
    ]
    return ResultTable(columns, cells, right)


def print_view(view: RenderableType, *, to: Console = results) -> None:
    """A result with tables in it: at its full width in a pipe, folded on a terminal, where that is said."""
    if not to.is_terminal:
        natural = _natural_width(view, lines=True)
        # A console of its own: `print` never takes a width beyond that of its console.
        Console(file=to.file, width=max(natural, to.width), color_system=None, highlight=False).print(view)
        return
    to.print(view)
    natural = _natural_width(view, lines=False)
    if natural > to.width:
        logs.print(
            f"a table here is {natural} columns wide and was folded to {to.width}: "
            "send the output into a pipe (| less -S) to get it whole",
            style="dim",
            markup=False,
        )


def _natural_width(view: RenderableType, *, lines: bool) -> int:
    """Full width of the widest table, and of the widest line; text in panels is for reading and may wrap."""
    if isinstance(view, Group):
        return max((_natural_width(part, lines=lines) for part in view.renderables), default=0)
    if isinstance(view, ResultTable):
        return view.natural_width
    if lines and isinstance(view, Text):
        return max((cell_len(line) for line in view.plain.splitlines()), default=0)
    return 0


def render_result(
    result: pa.Table, *, width: int | None, most_rows: int | None, longest_cell: int | None
) -> tuple[str, list[str]]:
    """A result as text, and remarks on what was left out or folded.

    Args:
        width: columns of the terminal; None: as wide as the rows are.
        most_rows: rows to show; None: all.
        longest_cell: characters of a cell to show; None: all.
    """
    names = result.column_names
    shown = result if most_rows is None else result.slice(0, most_rows)
    shortened = 0
    rows: list[list[str]] = []
    # A loop over rows: they are about to be printed one by one.
    values = [column.to_pylist(maps_as_pydicts="strict") for column in shown.columns]
    for record in zip(*values, strict=True):
        cells = [cell_text(value) for value in record]
        for index, cell in enumerate(cells):
            if longest_cell is not None and len(cell) > longest_cell:
                cells[index] = cell[: longest_cell - 1] + "…"
                shortened += 1
        rows.append(cells)
    right = [
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
        for kind in result.schema.types
    ]
    table = ResultTable(names, rows, right)
    natural = table.natural_width
    if width is not None and table.widths(width) is None:
        text = blocks_text(names, rows)
    else:
        text = _as_text(table, natural if width is None else width)
    return text, _remarks(result.num_rows, len(rows), shortened, folded=width is not None and natural > width)


def _as_text(table: ResultTable, width: int) -> str:
    sink = io.StringIO()
    Console(file=sink, width=max(width, 20), color_system=None, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines())


def blocks_text(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """One block per row, one line per column."""
    longest = max(len(name) for name in names)
    lines: list[str] = []
    for number, row in enumerate(rows, start=1):
        lines.append(f"── row {number} " + "─" * 20)
        for name, cell in zip(names, row, strict=True):
            first, *rest = cell.splitlines() or [""]
            lines.append(f"{name:<{longest}}  {first}")
            lines.extend(" " * (longest + 2) + line for line in rest)
    return "\n".join(lines)


def _remarks(total: int, shown: int, shortened: int, *, folded: bool) -> list[str]:
    remarks = [f"{total:,} row{'' if total == 1 else 's'}"]
    if shown < total:
        remarks = [f"{shown:,} of {total:,} rows shown: --rows 0 shows all, --format csv writes all"]
    if shortened:
        remarks.append(f"{shortened:,} long values shortened (…): --full shows them whole")
    if folded:
        remarks.append("too wide for this terminal: a pipe (| less -S) or --format csv gets it whole")
    return remarks
