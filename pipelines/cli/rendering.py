"""Query results as text: a table where it fits, one block per row where it does not.

Nothing is cut silently: whoever sees less than everything is told how much there is and how to get it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOM = 14
"""Width below which a column can no longer be read; a table that cannot give it to every column becomes blocks."""


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


def result_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> Table:
    """Cells as a rich table; long cells wrap, none is cut."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name, at_right in zip(columns, right, strict=True):
        table.add_column(Text(name), justify="right" if at_right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def render_result(
    result: pa.Table, *, width: int | None, most_rows: int | None, longest_cell: int | None
) -> tuple[str, list[str]]:
    """A result as text, and remarks on what was left out.

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
    widths = [
        max([cell_len(name), *(cell_len(line) for row in rows for line in row[index].splitlines())])
        for index, name in enumerate(names)
    ]
    if width is not None and sum(min(each, ROOM) + 2 for each in widths) > width:
        text = _blocks(names, rows)
    else:
        text = _as_text(result_table(names, rows, right), width or sum(widths) + 2 * len(widths) + 2)
    return text, _remarks(result.num_rows, len(rows), shortened)


def _as_text(table: Table, width: int) -> str:
    sink = io.StringIO()
    Console(file=sink, width=max(width, 20), color_system=None, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines())


def _blocks(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    longest = max(len(name) for name in names)
    lines: list[str] = []
    for number, row in enumerate(rows, start=1):
        lines.append(f"── row {number} " + "─" * 20)
        for name, cell in zip(names, row, strict=True):
            first, *rest = cell.splitlines() or [""]
            lines.append(f"{name:<{longest}}  {first}")
            lines.extend(" " * (longest + 2) + line for line in rest)
    return "\n".join(lines)


def _remarks(total: int, shown: int, shortened: int) -> list[str]:
    remarks = [f"{total:,} row{'' if total == 1 else 's'}"]
    if shown < total:
        remarks = [f"{shown:,} of {total:,} rows shown: --rows 0 shows all, --format csv writes all"]
    if shortened:
        remarks.append(f"{shortened:,} long values shortened (…): --full shows them whole")
    return remarks
