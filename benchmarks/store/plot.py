"""Pictures of a run: every measure as bars, ours in colour, and lines for what grows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer_engine.extras import require

if TYPE_CHECKING:
    from benchmarks.store.report import Run

SHOWN = (
    "bulk rows/s", "bulk CPU µs/row", "64-row commits rows/s", "64-row commit p99 ms",
    "64-row CPU µs/row", "64 objects rows/s", "64 objects CPU µs/row", "batch of 256 p50 ms", "batch CPU ms",
    "late scores ms", "change rewards ms", "group-by ms", "bytes/row", "compacted bytes/row", "4 writers rows/s",
    "4 writers CPU µs/row", "take 64 rows, 4 trainers p99 ms", "visible p50 ms", "visible p99 ms", "peak memory MB",
)  # fmt: skip
GROWN = ("64-row append CPU ms", "batch of 256 p50 ms", "late scores CPU ms", "group-by ms")
_OURS, _OTHERS, _LIMIT = "#1f5fa8", "#b4b8bf", "#d9822b"


def plot(done: Run, folder: Path) -> list[Path]:
    """Write `store.png`, and `growth.png` where growth was measured; returns the files."""
    matplotlib: Any = require("matplotlib", "view")
    matplotlib.use("Agg")
    paths = [_bars(done, folder / "store.png")]
    return [*paths, _lines(done, folder / "growth.png")] if done.growth else paths


def _bars(done: Run, path: Path) -> Path:
    from benchmarks.store.report import MEASURES, number

    plt: Any = require("matplotlib.pyplot", "view")
    better_of, machine = dict(MEASURES), done.machine()
    shown = [name for name in SHOWN if any(isinstance(one.values.get(name), float) for one in done.peers)]
    across = 4
    down = -(-len(shown) // across)
    figure, axes = plt.subplots(down, across, figsize=(19, 2.75 * down), squeeze=False)
    for axis, name in zip(axes.flat, shown, strict=False):
        found = [(one.kind, one.values.get(name)) for one in done.peers]
        bars = [(kind.title, value, _OURS if kind.name.startswith("ours") else _OTHERS) for kind, value in found]
        if name in machine:
            bars.append(("the machine itself", machine[name], _LIMIT))
        bars = [bar for bar in bars if isinstance(bar[1], float)]
        drawn = axis.barh([title for title, _, _ in bars], [value for _, value, _ in bars], height=0.72)
        for bar, (_, _, colour) in zip(drawn, bars, strict=True):
            bar.set_color(colour)
        axis.bar_label(drawn, [number(value) for _, value, _ in bars], padding=3, fontsize=8)
        axis.set_xlim(0, max(value for _, value, _ in bars) * 1.25 or 1)
        axis.invert_yaxis()
        axis.tick_params(axis="y", labelsize=8, length=0)
        axis.tick_params(axis="x", which="both", labelbottom=False, length=0)
        for side in ("top", "right", "bottom"):
            axis.spines[side].set_visible(False)
        axis.set_title(f"{name} ({better_of[name]} is better)", fontsize=9, loc="left")
    for axis in list(axes.flat)[len(shown) :]:
        axis.set_visible(False)
    quick = " (quick: not for quoting)" if done.quick else ""
    figure.suptitle(
        f"{done.rows:,} rows of about 1,000 tokens{quick}; late scores: {done.sizes.scores:,} keys", y=0.995
    )
    figure.tight_layout(rect=(0, 0, 1, 0.985), h_pad=1.6)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path


def _lines(done: Run, path: Path) -> Path:
    plt: Any = require("matplotlib.pyplot", "view")
    ticker: Any = require("matplotlib.ticker", "view")
    figure, axes = plt.subplots(1, len(GROWN), figsize=(19, 4.2), squeeze=False)
    titles = list(dict.fromkeys(one.kind.title for one in done.growth))
    colours = plt.get_cmap("tab10")
    for axis, name in zip(axes.flat, GROWN, strict=True):
        for at, title in enumerate(titles):
            points = [
                (one.rows, one.values[name])
                for one in done.growth
                if one.kind.title == title and isinstance(one.values.get(name), float)
            ]
            if points:
                ours = title.startswith("buffer-engine")
                colour = _OURS if ours else colours((at + 1) % 10)
                axis.plot(
                    *zip(*points, strict=True), marker="o", label=title, color=colour,
                    linewidth=2.6 if ours else 1.3, zorder=3 if ours else 2,
                )  # fmt: skip
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        for one in (axis.xaxis, axis.yaxis):
            one.set_minor_formatter(ticker.NullFormatter())
            one.set_minor_locator(ticker.NullLocator())
        axis.set_title(name, fontsize=10, loc="left")
        axis.set_xlabel("rows", fontsize=9)
        axis.grid(True, which="major", color="#e5e7ea")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    handles = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=len(titles), fontsize=9, frameon=False)
    figure.suptitle(
        "Growth, narrow rows of about 16 tokens (a line stops where a peer's time was used up)", fontsize=11
    )
    figure.tight_layout(rect=(0, 0.07, 1, 0.97))
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path
