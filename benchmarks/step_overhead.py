"""What the store costs in a step of the demo, beside a store that is a plain structure in memory.

    python -m benchmarks.step_overhead [--steps 6] [--rounds 2] [--write docs/benchmarks.md]

The demo's own loop and model run once with the store (with each durability) and once with `MemoryStore`, in turn, each
in a process of its own; evaluation and the plot are off. Every call to a store is timed from outside, so its share of
a step is counted and not only inferred from the difference of two long runs, which other work on the machine blurs.
The first and the last step of each run are left out: they warm up and save a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "pipelines" / "examples" / "demo.yaml"
STORES = ("memory", "process", "power")


@dataclass(slots=True)
class Account:
    """Seconds inside store calls since it was last read, by method; nested calls count once."""

    wall: float = 0.0
    cpu: float = 0.0
    calls: dict[str, float] = field(default_factory=dict[str, float])
    inside: bool = False


class Watched:
    """A store whose calls are timed; everything else is passed through."""

    def __init__(self, store: Any, account: Account) -> None:
        self._store = store
        self._account = account

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if not callable(value) or name == "open_run":
            return value
        return self._timed(name, value)

    def _timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        account = self._account

        @wraps(work)
        def call(*args: Any, **kwargs: Any) -> Any:
            if account.inside:
                return work(*args, **kwargs)
            account.inside = True
            begin, cpu = time.perf_counter(), time.process_time()
            try:
                found = work(*args, **kwargs)
                # Rows of a scan are read while it is walked, which would be outside of this clock.
                return iter(list(found)) if isinstance(found, Iterator) else found
            finally:
                wall = time.perf_counter() - begin
                account.wall += wall
                account.cpu += time.process_time() - cpu
                account.calls[name] = account.calls.get(name, 0.0) + wall
                account.inside = False

        return call


def run_one(kind: str, steps: int, folder: Path) -> dict[str, Any]:
    """Run the demo for `steps` steps; per step the seconds, and those inside the store."""
    from benchmarks.memory_store import MemoryStore
    from buffer_engine.store import open_store
    from pipelines.assemble import ALL_PARTS, assemble
    from pipelines.load import load_spec
    from pipelines.loop import Loop
    from pipelines.metrics import MetricWriter
    from pipelines.plan import build_plan
    from pipelines.progress import Progress

    overrides = (
        f"store.path={json.dumps(str(folder))}", f"loop.steps={steps}", "loop.evaluate=null",
        "report.plot=null", "report.tensorboard=false", "trainer.checkpoint.every_steps=1000000",
    )  # fmt: skip
    plan = build_plan(load_spec(DEMO, overrides=overrides))
    folder.mkdir(parents=True, exist_ok=True)
    inner: Any = MemoryStore(folder) if kind == "memory" else open_store(folder, durability=kind)  # type: ignore[arg-type]
    account, found = Account(), list[dict[str, Any]]()
    store: Any = Watched(inner, account)

    class StepClock(Progress):
        """Reads the clocks when a step is done."""

        cpu = 0.0

        def step_done(self, step: int, seconds: float) -> None:
            """Keep the step's numbers and begin anew."""
            now = time.process_time()
            found.append(
                {
                    "seconds": seconds, "cpu": now - self.cpu, "store": account.wall, "store_cpu": account.cpu,
                    "calls": dict(account.calls), "numbers": dict(self._numbers),
                }
            )  # fmt: skip
            self.cpu = now
            account.wall = account.cpu = 0.0
            account.calls.clear()
            self._numbers.clear()

    progress = StepClock(Console(stderr=True), quiet=True)
    assembly = assemble(plan, store, run_id="overhead", parts=ALL_PARTS)
    try:
        with inner.open_run("overhead"), MetricWriter(store, "overhead", folder, tensorboard=False) as writer:
            Loop(assembly, writer, progress, parts=ALL_PARTS).run()
    finally:
        assembly.close()
    return {"kind": kind, "steps": found}


def run_all(steps: int, rounds: int, say: Callable[[str], None]) -> dict[str, list[dict[str, Any]]]:
    """Steps that count, by store; the stores take turns, so that other work hits them about alike.

    Raises:
        AssertionError: the stores did not train the same: then their times cannot be compared.
    """
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in STORES}
    trained: dict[str, list[object]] = {}
    for turn in range(rounds):
        for kind in STORES:
            say(f"round {turn + 1} of {rounds}: {kind}")
            with tempfile.TemporaryDirectory(prefix="step-overhead-", dir=Path.cwd()) as name:
                words = [sys.executable, "-m", "benchmarks.step_overhead", "--one", kind, "--steps", str(steps)]
                done = subprocess.run(
                    [*words, "--folder", name], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
                )  # fmt: skip
            said = json.loads(done.stdout.splitlines()[-1])["steps"]
            losses = [one["numbers"].get("train/loss") for one in said]
            if trained.setdefault("losses", losses) != losses:
                raise AssertionError(f"{kind} trained {losses}, the others {trained['losses']}")
            found[kind] += said[1:-1]
    return found


def lines(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The result as Markdown."""
    base = statistics.median(one["seconds"] for one in found["memory"])
    base_cpu = statistics.median(one["cpu"] for one in found["memory"])
    table = [
        "| store | step s | step CPU s | step CPU against memory | inside the store, ms | CPU, ms | share of the step "
        "| share of its CPU | beyond memory |",
        "|" + " --- |" * 9,
    ]
    names = {"memory": "in memory", "process": "durability process (the default of a run)", "power": "durability power"}
    in_memory = statistics.median(one["store"] for one in found["memory"])
    for kind in STORES:
        steps = found[kind]
        seconds, cpu, store, store_cpu = (
            statistics.median(one[name] for one in steps) for name in ("seconds", "cpu", "store", "store_cpu")
        )
        table.append(
            f"| {names[kind]} | {seconds:.2f} | {cpu:.2f} | {cpu / base_cpu - 1:+.1%} | {store * 1e3:.1f} "
            f"| {store_cpu * 1e3:.1f} | {store / seconds:.2%} | {store_cpu / cpu:.2%} "
            f"| {(store - in_memory) / base:+.2%} |"
        )
    slowest = {
        name: statistics.median(one["calls"].get(name, 0.0) for one in found["process"])
        for name in {name for one in found["process"] for name in one["calls"]}
    }
    parts = ", ".join(
        f"{name} {seconds * 1e3:.1f}" for name, seconds in sorted(slowest.items(), key=lambda x: -x[1])[:6]
    )
    return [
        f"Medians of {len(found['memory'])} steps of each store, load average {os.getloadavg()[0]:.1f}, "
        f"{os.cpu_count()} processors; all three trained the same losses.",
        "",
        *table,
        "",
        f"With durability process the calls of a step take, in ms: {parts}.",
    ]


def main(words: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_overhead", description="the store's share of a step"
    )
    parser.add_argument("--steps", type=int, default=6, help="steps of each run; the first and the last are left out")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each store")
    parser.add_argument("--write", type=Path, help="a page whose part `step-overhead` is replaced")
    parser.add_argument("--one", choices=STORES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.steps < 3:
        parser.error("--steps must be 3 or more: the first and the last are left out")
    if given.one:
        print(json.dumps(run_one(given.one, given.steps, given.folder / "store")))
        return 0
    from benchmarks.store import pages

    if given.write:
        pages.check(given.write, "step-overhead")
    found = lines(run_all(given.steps, given.rounds, lambda text: print(text, file=sys.stderr, flush=True)))
    print("\n".join(found))
    if given.write:
        pages.fill(given.write, "step-overhead", "\n".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
