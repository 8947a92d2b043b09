"""What the sandbox costs: runs a second of a program that does nothing, and of HumanEval's solutions with their tests.

    python -m benchmarks.sandbox --runs 100

The same program is run without any isolation beside it, by `subprocess`, so that the price of the sandbox is the
difference. Wall time, because the kernel charges what a killed namespace has used to nobody who could be asked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import polars as pl

from explorers.tasksets.human_eval import HumanEvalConfig, HumanEvalTaskset
from operators.base import Context
from operators.sandbox.isolation import Isolation, find
from operators.sandbox.running import Sandbox
from operators.score.code_tests import CodeTests, CodeTestsConfig


def measure(name: str, run: Callable[[], object], runs: int, threads: int) -> None:
    """Print one line of the table."""
    run()
    seconds: list[float] = []

    def timed(_: int) -> None:
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(timed, range(runs)))
    wall = time.perf_counter() - begin
    median = statistics.median(seconds) * 1e3
    print(f"| {name} | {threads} | {runs / wall:.0f} | {median:.1f} | {min(seconds) * 1e3:.1f} |")


def answers() -> pl.DataFrame:
    """HumanEval's own solutions as replies."""
    tasks = HumanEvalTaskset(HumanEvalConfig.model_validate({"type": "human_eval"})).load("code")
    return pl.DataFrame(
        {
            "response": [f"{task.info['stub']}{task.info['canonical_solution']}" for task in tasks],
            "task_info": [json.dumps(dict(task.info)) for task in tasks],
        }
    )


def score(rows: pl.DataFrame, sandboxes: int) -> None:
    """Print the line of the operator."""
    config = CodeTestsConfig(
        type="code_tests", tests="test", stub="stub", entry_point="entry_point", sandboxes=sandboxes
    )  # fmt: skip
    begin = time.perf_counter()
    result = CodeTests(config).apply(rows, Context(seed=0, model_version=0, step=0))
    wall = time.perf_counter() - begin
    passed = result.scores[config.name].sum()
    if passed != rows.height:
        raise SystemExit(f"only {passed:g} of {rows.height} solutions pass: {result.comments}")
    print(f"| code_tests on HumanEval's {rows.height} solutions | {sandboxes} | {rows.height / wall:.0f} | | |")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    options = parser.parse_args()
    isolation = find()
    if not isinstance(isolation, Isolation):
        raise SystemExit(isolation)
    sandbox = Sandbox()
    plain = [isolation.python, "-s", "-S", "-B", "-c", "pass"]
    print("| what | at a time | runs/s | median ms | fastest ms |\n|---|---|---|---|---|")
    for threads in (1, 2):
        measure("Python without isolation", lambda: subprocess.run(plain, check=True), options.runs, threads)
        measure("Python in the sandbox", lambda: sandbox.run_python("pass"), options.runs, threads)
        measure("a command (`true`) in the sandbox", lambda: sandbox.run(["true"]), options.runs, threads)
    rows = answers()
    for sandboxes in (1, 2):
        score(rows, sandboxes)


if __name__ == "__main__":
    main()
