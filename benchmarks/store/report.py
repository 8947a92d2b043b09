"""The run: limits, every peer, limits again; then a table, a JSON file and a plot."""

from __future__ import annotations

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
from benchmarks.store.data import rollout_rows
from benchmarks.store.measures import BULK, SMALL, Numbers, Sizes, measure, one_row_bytes
from benchmarks.store.peers import PeerKind

MEASURES = (
    ("waits for", ""),
    ("bulk rows/s", "more"), ("bulk CPU µs/row", "less"),
    ("64-row commits rows/s", "more"), ("64-row commit p50 ms", "less"), ("64-row commit p99 ms", "less"),
    ("plain write + sync p50 ms", ""), ("plain write + sync p99 ms", ""),
    ("64-row CPU µs/row", "less"),
    ("batch of 256 ms", "less"), ("batch CPU ms", "less"), ("batch / memcpy of it", "less"),
    ("late scores ms", "less"), ("late scores CPU ms", "less"),
    ("group-by ms", "less"), ("group-by CPU ms", "less"),
    ("bytes/row", "less"),
    ("4 writers rows/s", "more"), ("4 writers CPU µs/row", "less"), ("lost / doubled", ""),
    ("visible p50 ms", "less"), ("visible p99 ms", "less"),
)  # fmt: skip
"""Rows of the table: measure, and whether more or less is better."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the benchmark.

    Attributes:
        limits: the machine's own limits, measured before and after the peers.
        load: one-minute load average before and after; other work on the machine shows here.
    """

    rows: int
    quick: bool
    sizes: Sizes
    peers: list[Numbers]
    limits: dict[str, tuple[float, float]]
    load: tuple[float, float]
    row_bytes: float

    def limit_lines(self) -> list[str]:
        """The machine's limits and load, in words."""
        lines = [f"{name}: {before:,.3g} before, {after:,.3g} after" for name, (before, after) in self.limits.items()]
        lines.append(f"load average: {self.load[0]:.1f} before, {self.load[1]:.1f} after; {os.cpu_count()} processors")
        share = self.bulk_share()
        if share is not None:
            lines.append(f"ours, bulk: {share:.0%} of the sequential write with fdatasync every {BULK} rows")
        return lines

    def bulk_share(self) -> float | None:
        """Bytes per second of our bulk append over what the disk takes in syncs of the same size."""
        value = next((one.values.get("bulk rows/s") for one in self.peers if one.kind.name == "ours"), None)
        written = self.limits["sequential write, fdatasync per bulk commit, MB/s"]
        return value * self.row_bytes / 1e6 / float(np.mean(written)) if isinstance(value, float) else None


def run(kinds: Sequence[PeerKind], *, rows: int, quick: bool, folder: Path | None, say: Callable[[str], None]) -> Run:
    """Measure everything in a temporary folder, which should lie on the disk that matters."""
    sizes = Sizes.of(rows, quick=quick)
    row_bytes = one_row_bytes(rollout_rows(SMALL))
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-store-") as name:
        place = Path(name)
        load = os.getloadavg()[0]
        say("limits of the machine")
        before = _limits(place, row_bytes, quick=quick)
        peers = measure(kinds, place, sizes, say)
        say("limits of the machine, again")
        after = _limits(place, row_bytes, quick=quick)
        loads = (load, os.getloadavg()[0])
    both = {name: (before[name], after[name]) for name in before}
    return Run(rows, quick, sizes, peers, both, loads, row_bytes)


def _limits(folder: Path, row_bytes: float, *, quick: bool) -> dict[str, float]:
    bulk = int(BULK * row_bytes)
    written = limits.sequential_write(folder, bulk * (2 if quick else 8), bulk)
    return {
        "memcpy, GB/s": limits.memory_copy() / 1e9,
        "sequential write, fdatasync per bulk commit, MB/s": written / 1e6,
    }


def table_rows(done: Run) -> tuple[list[str], list[list[str]]]:
    """Column titles and cells: a row for each measure, a column for each peer, and the ratio to ours beside it."""
    present = [one for one in done.peers if "status" not in one.values]
    titles = ["measure", *(one.kind.title for one in present)]
    ours = next((one for one in present if one.kind.name == "ours"), None)
    cells: list[list[str]] = []
    for name, better in MEASURES:
        label = f"late scores, {done.sizes.scores:,} keys{name.removeprefix('late scores')}" if "late" in name else name
        cells.append([label, *(_cell(name, better, one, ours) for one in present)])
    return titles, cells


def absent_lines(done: Run) -> list[str]:
    """Peers that were not measured, and why."""
    return [f"{one.kind.title}: {one.values['status']}" for one in done.peers if "status" in one.values]


def _cell(name: str, better: str, one: Numbers, ours: Numbers | None) -> str:
    if name == "waits for":
        return one.kind.syncs
    value = one.values.get(name, "–")
    if isinstance(value, str):
        return value
    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    base = None if ours is None or ours is one else ours.values.get(name)
    if not isinstance(base, float) or not better or min(base, value) <= 0:
        return text
    return f"{text} ({base / value if better == 'more' else value / base:.2g}×)"


def save(done: Run, folder: Path) -> list[Path]:
    """Write `store.json` and `store.png`; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    said: dict[str, Any] = {
        "rows": done.rows, "quick": done.quick, "row_bytes": done.row_bytes, "limits": done.limits, "load": done.load,
        "python": platform.python_version(), "processors": os.cpu_count(),
        "peers": {
            one.kind.name: {"title": one.kind.title, "waits_for": one.kind.syncs, **one.values} for one in done.peers
        },
    }  # fmt: skip
    numbers = folder / "store.json"
    numbers.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return [numbers, _plot(done, folder / "store.png")]


def _plot(done: Run, path: Path) -> Path:
    from buffer_engine.extras import require

    matplotlib = require("matplotlib", "view")
    matplotlib.use("Agg")
    plt: Any = require("matplotlib.pyplot", "view")
    shown = [name for name, better in MEASURES if better and "p50" not in name]
    present = [one for one in done.peers if "status" not in one.values]
    figure, axes = plt.subplots(-(-len(shown) // 4), 4, figsize=(16, 2.6 * -(-len(shown) // 4)), squeeze=False)
    better_of = dict(MEASURES)
    for axis, name in zip(axes.flat, shown, strict=False):
        values = [(one.kind.title, one.values.get(name)) for one in present]
        found = [(title, value) for title, value in values if isinstance(value, float)]
        colours = ["tab:blue" if title.startswith("buffer-engine") else "tab:gray" for title, _ in found]
        bars = axis.barh([title for title, _ in found], [value for _, value in found], color=colours)
        axis.bar_label(bars, [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for _, value in found], padding=3)
        axis.invert_yaxis()
        axis.margins(x=0.25)
        axis.set_xticks([])
        axis.set_title(f"{name} ({better_of[name]} is better)", fontsize=9)
        axis.tick_params(labelsize=8)
    for axis in list(axes.flat)[len(shown) :]:
        axis.set_visible(False)
    quick = " (quick: not for quoting)" if done.quick else ""
    figure.suptitle(f"{done.rows:,} rows of about 1,000 tokens{quick}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
