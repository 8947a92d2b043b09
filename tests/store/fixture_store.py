"""A small store with a row of every kind, kept once per schema version so that migrations can be tried on real files.

`python tests/store/fixture_store.py FOLDER` writes `v<schema version>.tar.gz` there; run it before a schema version is
left behind. Files of earlier versions are never made anew.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path

from store_rows import WHEN, decisions, manifest, model, rollout, score, table, task

from buffer_engine.schema import SCHEMA_VERSION
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.opening import open_store

RUN = "run"


def fill(folder: Path) -> None:
    """Write the store: six rollouts, one trained batch, one that waits for its commit, a late score."""
    with open_store(folder) as store:
        store.append("tasks", table("tasks", [task("t0"), task("t1"), task("held", partition="eval")]))
        store.append("models", model(0, parent=None, step=0))
        rows = [rollout(number) for number in range(4)]
        rows.append(rollout(4, task_id="held", group_id="g-eval", partition="eval", group_size=1, sample_index=0))
        rows.append(rollout(5, task_id="t1", group_id="g-failed", group_size=1, sample_index=0, error="timeout: 3 s"))
        store.append("rollouts", table("rollouts", rows), cursors={"tasks/train": 2})
        store.append("scores", table("scores", [score(f"x{number}", float(number % 2)) for number in range(4)]))
        store.append("decisions", decisions(range(4)))
        store.append("decisions", decisions([5], "reject", operator="intake", reason="error"))
        for step in (1, 2):
            batch_id = f"{RUN}-{step}"
            held = store.reserve(ReadPolicy(rows=2), run_id=RUN, batch_id=batch_id, model_version=step - 1)
            assert held is not None
            batch, batch_rows = manifest(batch_id, step, held.experience_ids)
            store.prepare_batch(held, step=step, batch=batch, rows=batch_rows)
            if step == 1:
                store.commit_batch(batch_id, step=1, model=model(1))
        late = score("x0", 0.25, version=2, source="human", author="anna", comment="late")
        store.append("scores", table("scores", [late]))
        metric = {"run_id": RUN, "step": 1, "name": "loss", "value": 0.5, "recorded_at": WHEN}
        store.append("metrics", table("metrics", [metric]))
        event = {
            "run_id": RUN, "step": 1, "kind": "retry", "count": 2, "experience_id": None, "detail": None,
            "recorded_at": WHEN,
        }  # fmt: skip
        store.append("events", table("events", [event]))


def pack(folder: Path) -> Path:
    """Write the store of this schema version as an archive into `folder`."""
    archive = folder / f"v{SCHEMA_VERSION}.tar.gz"
    with tempfile.TemporaryDirectory() as scratch:
        fill(Path(scratch) / "store")
        with tarfile.open(archive, "w:gz") as out:
            out.add(Path(scratch) / "store", arcname="store")
    return archive


if __name__ == "__main__":
    print(pack(Path(sys.argv[1])))
