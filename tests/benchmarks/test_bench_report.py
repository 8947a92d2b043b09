"""Tables, targets and pictures of a run with known numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.store import report, targets
from benchmarks.store.data_files import Sizes
from benchmarks.store.growth import Growth
from benchmarks.store.measures import Numbers
from benchmarks.store.peers import KINDS


@pytest.fixture
def run() -> report.Run:
    """Ours twice as quick as Lance in wall time and five times by processor time; Trinity-RFT is not installed."""
    ours = Numbers(
        KINDS["ours"],
        {
            "bulk rows/s": 1000.0, "bulk CPU µs/row": 10.0, "64-row commit p99 ms": 4.0, "lost / doubled": "0 / 1",
            "compacted bytes/row": 5000.0, "compacted bytes/trainable token": 6.25, "plain write + sync p99 ms": 1.0,
            "late scores ms": 3.0, "visible p50 ms": 6.0,
        },
    )  # fmt: skip
    lance = Numbers(
        KINDS["lance"],
        {
            "bulk rows/s": 500.0, "bulk CPU µs/row": 50.0, "late scores ms": 1.5,
            "group-by ms": "failed: RuntimeError: a | b",
        },
        cuts={"bulk rows/s": "3 of 6 commits in 60 s"},
    )  # fmt: skip
    trinity = Numbers(KINDS["trinity"], status="not installed: python -m benchmarks.store.peers_env trinity")
    grown = [
        Growth(KINDS["ours"], 10_000, values={"batch of 256 p50 ms": 2.0, "group-by ms": 1.0}),
        Growth(KINDS["ours"], 1_000_000, values={"batch of 256 p50 ms": 3.2, "group-by / DuckDB on Parquet": 1.2}),
        Growth(KINDS["lance"], 8192, cut="60 s for 10,000", values={"group-by ms": "no SQL"}),
    ]
    limits = {"memcpy, GB/s": (2.0, 4.0), "sequential write, fdatasync per bulk commit, MB/s": (10.0, 30.0)}
    return report.Run(
        4096, False, Sizes.of(4096, quick=False), [ours, lance, trinity], grown, limits, (0.5, 1.5), 10_000.0, 800.0
    )


def test_a_cell_says_how_many_times_as_good_ours_is_and_where_a_loop_was_cut(run: report.Run) -> None:
    titles, cells = report.table_rows(run)
    assert titles == ["measure", "buffer-engine", "Lance", "Trinity-RFT SQLite", report.MACHINE]
    row = {cell[0]: cell[1:] for cell in cells}
    # the machine writes (10 + 30) / 2 MB/s of rows of 10,000 bytes: 2,000 rows a second
    assert row["bulk rows/s"] == ["1,000", "500 (2×) [cut: 3 of 6 commits in 60 s]", "not installed", "2,000 (0.5×)"]
    assert row["bulk CPU µs/row"] == ["10", "50 (5×)", "not installed", "–"]
    assert row["late scores, 4,096 keys ms"] == ["3", "1.5 (0.5×)", "not installed", "–"]
    assert row["64-row commit p99 ms"][3] == "1 (0.25×)"
    assert row["an append waits for"][:2] == ["fdatasync + SQLite FULL", "no sync"]
    assert "not installed: python -m benchmarks.store.peers_env trinity" in run.note_lines()[-1]


def test_targets_follow_from_the_numbers_of_the_run(run: report.Run) -> None:
    _, cells = targets.target_rows(run)
    row = {cell[0]: cell[1:] for cell in cells}
    assert len(row) == len(targets.TARGETS)
    assert row["bulk append against Trinity-RFT"] == ["≥ 85×", "not measured", "", "–"]
    assert row["bulk append against Lance, which does not sync"] == ["≥ 5×", "2×", "5×", "no"]
    assert row["bulk append, of the sequential write with as many syncs"] == ["≥ 70 %", "50 %", "", "no"]
    assert row["64-row commit, p99"] == ["≤ 5 ms", "4 ms", "", "yes"]
    assert row["four writers, rows lost or doubled"] == ["≤ 0", "1", "", "no"]
    assert row["cold bytes, of the raw ones"] == ["≤ 0.55×", "0.5×", "", "yes"]
    assert row["batch of 256, largest store against 10,000 rows"][1:] == ["1.6×", "", "no"]
    assert row["group-by at 1,000,000 rows against DuckDB on one Parquet file"][1:] == ["1.2×", "", "yes"]
    assert row["another process sees a commit, p50"] == ["≤ 5 ms", "6 ms", "", "no"]


def test_a_page_holds_every_table_with_bars_inside_cells_escaped(run: report.Run) -> None:
    text = report.markdown(run)
    assert "4,096 rows of about 1,000 tokens, 10,000 bytes each in Arrow, 800 of their tokens trainable." in text
    assert "| Lance | 8,192 [cut: 60 s for 10,000] |" in text
    assert "failed: RuntimeError: a \\| b" in text
    assert "load average: 0.5 before, 1.5 after" in text
    assert "quick" not in text


def test_both_pictures_are_drawn_from_what_there_is(run: report.Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = report.save(run, tmp_path)
    assert [path.name for path in paths] == ["store.json", "store.md", "store.png", "growth.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[2:])
