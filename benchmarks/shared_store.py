"""What a shared store costs: `python -m benchmarks.shared_store ADDRESSES.json`, beside the same on one machine.

ADDRESSES.json has `catalog` and `segments` as `open_store` takes them, and may have AWS_* variables;
`python tests/servers.py` starts servers for a try and prints such a file. Times are wall times, so the machine should
be quiet; the CPU time of this process stands beside them.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from benchmarks.store.data import rollout_rows, score_rows
from buffer_engine.schema import TABLES
from buffer_engine.store import LocalStore, open_store
from buffer_engine.store.base import ReadPolicy

APPENDS, SEEN, ROWS = 100, 30, 64


def measured(action: Callable[[int], object], times: int) -> str:
    """Median and worst of a hundred in milliseconds, and CPU time of one."""
    took: list[float] = []
    began = time.process_time()
    for number in range(times):
        start = time.perf_counter()
        action(number)
        took.append(1e3 * (time.perf_counter() - start))
    cpu = 1e3 * (time.process_time() - began) / times
    worst = sorted(took)[int(0.99 * (times - 1))]
    return f"p50 {statistics.median(took):6.1f} ms   p99 {worst:6.1f} ms   cpu {cpu:5.1f} ms"


def fresh(where: dict[str, str]) -> dict[str, str]:
    """Addresses of a store of its own beside the one that `where` names."""
    name = f"bench_{secrets.token_hex(4)}"
    catalog, _, _ = where["catalog"].rpartition("schema=")
    place, _, options = where["segments"].partition("?")
    return {"catalog": f"{catalog}schema={name}", "segments": f"{place.rpartition('/')[0]}/{name}?{options}"}


def kept(ids: list[str]) -> pa.Table:
    """Verdicts that keep these rows."""
    rows = [
        {
            "experience_id": one, "verdict": "keep", "operator": "pipeline", "reason": "", "pass_id": "p",
            "run_id": "bench", "decided_at": datetime.now(UTC),
        }
        for one in ids
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=TABLES["decisions"].schema)


def measure(store: LocalStore, other: LocalStore) -> None:
    """Print every measure; `other` is the same store as another machine has it open."""
    every = [rollout_rows(ROWS, first=number * ROWS) for number in range(APPENDS + SEEN)]
    ids = [one for table in every for one in table.column("experience_id").to_pylist()]
    run_id = every[0].column("run_id")[0].as_py()
    print("  append 64 rows, power    ", measured(lambda n: store.append("rollouts", every[n]), APPENDS))
    start = time.perf_counter()
    count = other.table("rollouts").num_rows
    print(f"  first read of {count} rows in {APPENDS} appends: {1e3 * (time.perf_counter() - start):.0f} ms")

    def see(number: int) -> None:
        before = other.version()
        store.append("rollouts", every[APPENDS + number])
        assert sum(batch.num_rows for batch in other.scan("rollouts", after=before)) == ROWS

    print("  append 64, read elsewhere", measured(see, SEEN))
    late = ids[:2_000]
    print(
        "  score 2,000 rows late    ", measured(lambda n: store.append("scores", score_rows(late, version=n + 1)), 20)
    )
    store.append("decisions", kept(ids))

    def turn(number: int) -> None:
        name = f"b{number}"
        found = store.reserve(ReadPolicy(rows=256), run_id=run_id, batch_id=name, model_version=0)
        assert found is not None
        assert len(found.experience_ids) == 256
        store.release(name)

    print("  reserve 256 and release  ", measured(turn, 30))


def main() -> None:
    """Measure both kinds and print a table."""
    given = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update({name: value for name, value in given.items() if name.startswith("AWS_")})
    with tempfile.TemporaryDirectory() as folder:
        for name, where in (("one machine", {}), ("shared", fresh(given))):
            print(name)
            with open_store(Path(folder, name, "a"), **where) as store:
                with open_store(Path(folder, name, "b" if where else "a"), **where) as other:
                    measure(store, other)


if __name__ == "__main__":
    main()
