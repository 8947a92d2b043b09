"""The run: limits, every peer, limits again; then a table, files and a plot."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.store import limits
from benchmarks.store.data_files import BULK, DataFiles, Sizes
from benchmarks.store.growth import Growth, grow
from benchmarks.store.measures import Bench, Numbers, measure
from benchmarks.store.peers import PeerKind
from benchmarks.store.targets import target_rows

MEASURES = (
    ("an append waits for", ""),
    ("bulk rows/s", "more"), ("bulk CPU µs/row", "less"),
    ("64-row commits rows/s", "more"), ("64-row commit p50 ms", "less"), ("64-row commit p99 ms", "less"),
    ("64-row CPU µs/row", "less"), ("64-row CPU p50 ms", "less"), ("64-row CPU p99 ms", "less"),
    ("64 objects rows/s", "more"), ("64 objects CPU µs/row", "less"),
    ("batch of 256 p50 ms", "less"), ("batch of 256 p99 ms", "less"), ("batch CPU ms", "less"),
    ("batch / memcpy of it", "less"),
    ("late scores ms", "less"), ("late scores CPU ms", "less"),
    ("change rewards ms", "less"), ("change rewards CPU ms", "less"),
    ("group-by ms", "less"), ("group-by CPU ms", "less"),
    ("bytes/row", "less"),
    ("compacted bytes/row", "less"), ("compacted bytes/trainable token", "less"), ("compaction CPU µs/row", "less"),
    ("compacted group-by ms", "less"), ("compacted batch of 256 ms", "less"),
    ("4 writers rows/s", "more"), ("4 writers CPU µs/row", "less"), ("lost / doubled", ""),
    ("take 64 rows, 4 trainers p50 ms", "less"), ("take 64 rows, 4 trainers p99 ms", "less"),
    ("not taken / taken twice", ""),
    ("visible p50 ms", "less"), ("visible p99 ms", "less"),
    ("memory at start MB", "less"), ("peak memory MB", "less"),
)  # fmt: skip
"""Rows of the table: measure, and whether more or less is better."""

MACHINE = "the machine itself"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the benchmark.

    Attributes:
        limits: the machine's own limits, measured before and after the peers.
        load: one-minute load average before and after; other work on the machine shows here.
        row_bytes: raw bytes of a row in Arrow.
    """

    rows: int
    quick: bool
    sizes: Sizes
    peers: list[Numbers]
    growth: list[Growth]
    limits: dict[str, tuple[float, float]]
    load: tuple[float, float]
    row_bytes: float
    trainable_tokens: float

    @property
    def ours(self) -> Numbers | None:
        """What was measured of this package's store with syncs."""
        return next((one for one in self.peers if one.kind.name == "ours" and not one.status), None)

    def machine(self) -> dict[str, float]:
        """The physical limit beside a measure: bare writes with fdatasync of as many bytes, a copy of a batch."""
        found = {
            "bulk rows/s": float(np.mean(self.limits["sequential write, fdatasync per bulk commit, MB/s"]))
            * 1e6 / self.row_bytes,
            "bytes/row": self.row_bytes,
        }  # fmt: skip
        beside = {} if self.ours is None else self.ours.values
        for name, at in (
            ("64-row commits rows/s", "plain write + sync rows/s"),
            ("64-row commit p50 ms", "plain write + sync p50 ms"),
            ("64-row commit p99 ms", "plain write + sync p99 ms"),
            ("batch of 256 p50 ms", "memcpy of a batch p50 ms"),
            ("batch of 256 p99 ms", "memcpy of a batch p99 ms"),
        ):
            value = beside.get(at)
            if isinstance(value, float):
                found[name] = value
        return found

    def limit_lines(self) -> list[str]:
        """The machine's limits and load, in words."""
        lines = [f"{name}: {before:,.3g} before, {after:,.3g} after" for name, (before, after) in self.limits.items()]
        lines.append(f"load average: {self.load[0]:.1f} before, {self.load[1]:.1f} after; {os.cpu_count()} processors")
        return lines

    def note_lines(self) -> list[str]:
        """What must be known beside the numbers, and who is missing."""
        lines = [f"{one.kind.title}: {one.kind.notes}" for one in self.peers if one.kind.notes and not one.status]
        return lines + [f"{one.kind.title}: {one.status}" for one in self.peers if one.status]


def run(
    kinds: Sequence[PeerKind],
    *,
    rows: int,
    quick: bool,
    growth: Sequence[int],
    folder: Path | None,
    say: Callable[[str], None],
) -> Run:
    """Measure everything in a temporary folder, which should lie on the disk that matters."""
    sizes = Sizes.of(rows, quick=quick)
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-store-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        load = os.getloadavg()[0]
        say("rows")
        data = DataFiles.make(place / "data", sizes)
        say("limits of the machine")
        before = _limits(place, data.row_bytes, quick=quick)
        peers = measure(kinds, Bench(data, sizes, place, say))
        grown = grow([one.kind for one in peers if not one.status], growth, place / "growth", say) if growth else []
        say("limits of the machine, again")
        after = _limits(place, data.row_bytes, quick=quick)
        loads = (load, os.getloadavg()[0])
    both = {name: (before[name], after[name]) for name in before}
    return Run(rows, quick, sizes, peers, grown, both, loads, data.row_bytes, data.trainable_tokens)


def _limits(folder: Path, row_bytes: float, *, quick: bool) -> dict[str, float]:
    bulk = int(BULK * row_bytes)
    written = limits.sequential_write(folder, bulk * (2 if quick else 8), bulk)
    return {
        "memcpy, GB/s": limits.memory_copy() / 1e9,
        "sequential write, fdatasync per bulk commit, MB/s": written / 1e6,
    }


def table_rows(done: Run) -> tuple[list[str], list[list[str]]]:
    """Column titles and cells: a row for each measure, a column for each peer with the ratio to ours in brackets."""
    titles = ["measure", *(one.kind.title for one in done.peers), MACHINE]
    machine, base = done.machine(), {} if done.ours is None else done.ours.values
    cells: list[list[str]] = []
    for name, better in MEASURES:
        label = name
        for begin in ("late scores", "change rewards"):
            if name.startswith(begin):
                label = f"{begin}, {done.sizes.scores:,} keys{name.removeprefix(begin)}"
        row = [label, *(_cell(name, better, one, base) for one in done.peers)]
        row.append(_with_ratio(name, better, machine[name], base) if name in machine else "–")
        cells.append(row)
    return titles, cells


def _cell(name: str, better: str, one: Numbers, base: dict[str, float | str]) -> str:
    if one.status:
        return "not installed" if one.status.startswith("not installed") else "failed to open"
    if not better and name == "an append waits for":
        return one.kind.syncs
    value = one.values.get(name, "–")
    if isinstance(value, str):
        return value
    text = number(value) if one.kind.name == "ours" else _with_ratio(name, better, value, base)
    return f"{text} [cut: {one.cuts[name]}]" if name in one.cuts else text


def _with_ratio(name: str, better: str, value: float, base: dict[str, float | str]) -> str:
    ours = base.get(name)
    if not isinstance(ours, float) or not better or min(ours, value) <= 0:
        return number(value)
    ratio = ours / value if better == "more" else value / ours
    return f"{number(value)} ({f'{ratio:,.0f}' if ratio >= 10 else f'{ratio:.2g}'}×)"


def number(value: float) -> str:
    """Three digits, all of them before the point where there are more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def growth_rows(done: Run) -> tuple[list[str], list[list[str]]]:
    """Column titles and cells of the growth table: a row for each peer and size."""
    titles = ["peer", "rows", *GROWTH_MEASURES]
    cells = [
        [
            one.kind.title,
            f"{one.rows:,}" + (f" [cut: {one.cut}]" if one.cut else ""),
            *(_grown(one.values.get(name, "–")) for name in GROWTH_MEASURES),
        ]
        for one in done.growth
    ]
    return titles, cells


GROWTH_MEASURES = (
    "64-row append p50 ms", "64-row append CPU ms", "batch of 256, first ms", "batch of 256 p50 ms", "batch CPU ms",
    "late scores, 1,000 keys ms", "late scores CPU ms", "group-by ms", "group-by / DuckDB on Parquet",
    "open + first batch ms", "bytes/row", "fill rows/s",
)  # fmt: skip
"""Columns of the growth table."""


def _grown(value: float | str) -> str:
    return value if isinstance(value, str) else number(value)


def markdown(done: Run) -> str:
    """Both tables, limits and notes, as they go into a page."""
    lines = [
        f"{done.rows:,} rows of about 1,000 tokens, {done.row_bytes:,.0f} bytes each in Arrow, "
        f"{done.trainable_tokens:,.0f} of their tokens trainable. Python {platform.python_version()}."
        + (" **A quick run: not for quoting.**" if done.quick else ""),
        "",
        *_table(*table_rows(done)),
        "",
        *(f"- {line}" for line in [*done.limit_lines(), *done.note_lines()]),
    ]
    if done.growth:
        lines += ["", "Growth, narrow rows of about 16 tokens:", "", *_table(*growth_rows(done))]
    lines += ["", "Targets:", "", *_table(*target_rows(done))]
    return "\n".join(lines) + "\n"


def _table(titles: list[str], cells: list[list[str]]) -> list[str]:
    rows = [titles, ["---"] * len(titles), *cells]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def save(done: Run, folder: Path) -> list[Path]:
    """Write `store.json`, `store.md` and `store.png`; returns the files."""
    from benchmarks.store.plot import plot

    folder.mkdir(parents=True, exist_ok=True)
    said: dict[str, Any] = {
        "rows": done.rows, "quick": done.quick, "row_bytes": done.row_bytes, "limits": done.limits, "load": done.load,
        "trainable_tokens": done.trainable_tokens, "sizes": dataclasses.asdict(done.sizes),
        "python": platform.python_version(), "processors": os.cpu_count(), "machine": done.machine(),
        "peers": {
            one.kind.name: {
                "title": one.kind.title, "waits_for": one.kind.syncs, "requirements": one.kind.requirements,
                "notes": one.kind.notes, "status": one.status, "cuts": one.cuts, "values": one.values,
            }
            for one in done.peers
        },
        "growth": [
            {"peer": one.kind.name, "rows": one.rows, "cut": one.cut, "values": one.values} for one in done.growth
        ],
    }  # fmt: skip
    numbers, page = folder / "store.json", folder / "store.md"
    numbers.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    page.write_text(markdown(done), encoding="utf-8")
    return [numbers, page, *plot(done, folder)]
