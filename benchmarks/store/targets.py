"""What the store is meant to reach, and what a run says about it: in wall time, and in processor time beside it.

A ratio is how many times as good as the peer our store is in the same run. Processor time is what other work on the
machine moves least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.store.report import Run


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to reach.

    Attributes:
        what: in words.
        asked: the least (or, with `most`, the most) that will do.
        reached: the number of a run; None where the run has none.
        by_cpu: the same by processor time; None where that means nothing.
        unit: behind the number.
    """

    what: str
    asked: float
    reached: Callable[[Run], float | None]
    by_cpu: Callable[[Run], float | None] = lambda run: None
    most: bool = False
    unit: str = "×"

    def met(self, run: Run) -> bool | None:
        """Whether the number in wall time will do; None where there is none."""
        value = self.reached(run)
        return None if value is None else (value <= self.asked if self.most else value >= self.asked)


def _value(run: Run, name: str, peer: str = "ours") -> float | None:
    for one in run.peers:
        value = one.values.get(name)
        if one.kind.name == peer and isinstance(value, float):
            return value
    return None


def _against(name: str, peer: str, *, more: bool = True, ours: str = "ours") -> Callable[[Run], float | None]:
    def ratio(run: Run) -> float | None:
        mine, theirs = _value(run, name, ours), _value(run, name, peer)
        if not mine or not theirs:
            return None
        return mine / theirs if more else theirs / mine

    return ratio


def _own(name: str) -> Callable[[Run], float | None]:
    return lambda run: _value(run, name)


def _share_of_write(run: Run) -> float | None:
    value = _value(run, "bulk rows/s")
    return None if value is None else 100 * value / run.machine()["bulk rows/s"]


def _of_raw(run: Run) -> float | None:
    value = _value(run, "compacted bytes/row")
    return None if value is None else value / run.row_bytes


def _lost(run: Run) -> float | None:
    value = next((one.values.get("lost / doubled") for one in run.peers if one.kind.name == "ours"), None)
    return (
        float(sum(int(part) for part in value.split(" / "))) if isinstance(value, str) and value[0].isdigit() else None
    )


def _grown(name: str) -> Callable[[Run], float | None]:
    def ratio(run: Run) -> float | None:
        found = [one.values.get(name) for one in run.growth if one.kind.name == "ours"]
        numbers = [value for value in found if isinstance(value, float)]
        return numbers[-1] / numbers[0] if len(numbers) > 1 else None

    return ratio


def _at_a_million(name: str) -> Callable[[Run], float | None]:
    def value(run: Run) -> float | None:
        found = [one.values.get(name) for one in run.growth if one.kind.name == "ours" and one.rows >= 1_000_000]
        return found[0] if found and isinstance(found[0], float) else None

    return value


TARGETS = (
    Target(
        "bulk append against Trinity-RFT", 85,
        _against("bulk rows/s", "trinity"), _against("bulk CPU µs/row", "trinity", more=False),
    ),
    Target(
        "bulk append against Lance, which does not sync", 5,
        _against("bulk rows/s", "lance"), _against("bulk CPU µs/row", "lance", more=False),
    ),
    Target("bulk append, of the sequential write with as many syncs", 70, _share_of_write, unit=" %"),
    Target(
        "64 Python objects, synced, against Trinity-RFT", 40,
        _against("64 objects rows/s", "trinity"), _against("64 objects CPU µs/row", "trinity", more=False),
    ),
    Target(
        "64 Python objects, not synced, against Trinity-RFT", 70,
        _against("64 objects rows/s", "trinity", ours="ours-process"),
        _against("64 objects CPU µs/row", "trinity", more=False, ours="ours-process"),
    ),
    Target(
        "64-row commits against Trinity-RFT", 80,
        _against("64-row commits rows/s", "trinity"), _against("64-row CPU µs/row", "trinity", more=False),
    ),
    Target(
        "64-row commits against Lance, which does not sync", 14,
        _against("64-row commits rows/s", "lance"), _against("64-row CPU µs/row", "lance", more=False),
    ),
    Target(
        "64-row commit, p99", 5, _own("64-row commit p99 ms"), _own("64-row CPU p99 ms"), most=True, unit=" ms",
    ),
    Target(
        "four writers against Trinity-RFT", 60,
        _against("4 writers rows/s", "trinity"), _against("4 writers CPU µs/row", "trinity", more=False),
    ),
    Target(
        "four writers against Lance, which does not sync", 5,
        _against("4 writers rows/s", "lance"), _against("4 writers CPU µs/row", "lance", more=False),
    ),
    Target("four writers, rows lost or doubled", 0, _lost, most=True, unit=""),
    Target("batch of 256 against a copy of its bytes", 3.5, _own("batch / memcpy of it"), most=True),
    Target(
        "batch of 256 against Trinity-RFT", 30,
        _against("batch of 256 p50 ms", "trinity", more=False), _against("batch CPU ms", "trinity", more=False),
    ),
    Target(
        "batch of 256, largest store against 10,000 rows", 1.5,
        _grown("batch of 256 p50 ms"), _grown("batch CPU ms"), most=True,
    ),
    Target(
        "64-row append, largest store against 10,000 rows", 1.5,
        _grown("64-row append p50 ms"), _grown("64-row append CPU ms"), most=True,
    ),
    Target(
        "late scores beside the rows against Trinity-RFT, which overwrites", 40,
        _against("late scores ms", "trinity", more=False), _against("late scores CPU ms", "trinity", more=False),
    ),
    Target(
        "changed rewards against Lance", 500,
        _against("change rewards ms", "lance", more=False), _against("change rewards CPU ms", "lance", more=False),
    ),
    Target(
        "late scores, largest store against 10,000 rows", 1.5,
        _grown("late scores, 1,000 keys ms"), _grown("late scores CPU ms"), most=True,
    ),
    Target(
        "reserve, manifest and commit of 64 rows, 4 trainers, p99", 15,
        _own("take 64 rows, 4 trainers p99 ms"), most=True, unit=" ms",
    ),
    Target("another process sees a commit, p50", 5, _own("visible p50 ms"), most=True, unit=" ms"),
    Target("another process sees a commit, p99", 25, _own("visible p99 ms"), most=True, unit=" ms"),
    Target(
        "group-by at 1,000,000 rows against DuckDB on one Parquet file", 1.5,
        _at_a_million("group-by / DuckDB on Parquet"), most=True,
    ),
    Target("cold bytes, of the raw ones", 0.55, _of_raw, most=True),
    Target("cold bytes per trainable token", 8, _own("compacted bytes/trainable token"), most=True, unit=""),
    Target(
        "open and first batch at 1,000,000 rows", 300,
        _at_a_million("open + first batch ms"), most=True, unit=" ms",
    ),
)  # fmt: skip
"""What the design asks for."""


def target_rows(run: Run) -> tuple[list[str], list[list[str]]]:
    """Column titles and cells: target, what is asked, what was reached, by processor time, whether it will do."""
    from benchmarks.store.report import number

    cells: list[list[str]] = []
    for target in TARGETS:
        reached, by_cpu, met = target.reached(run), target.by_cpu(run), target.met(run)
        cells.append(
            [
                target.what,
                f"{'≤' if target.most else '≥'} {number(target.asked)}{target.unit}",
                "not measured" if reached is None else f"{number(reached)}{target.unit}",
                "" if by_cpu is None else f"{number(by_cpu)}{target.unit}",
                {True: "yes", False: "no", None: "–"}[met],
            ]
        )
    return ["target", "asked", "reached", "by processor time", "met"], cells
