"""A small piece of work whose system calls are failed from outside, and the tracer that fails them."""

from __future__ import annotations

import multiprocessing.connection
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from fault_roles import RUN
from store_rows import decisions, manifest, model, rollouts, score, table
from store_workload import Acknowledgements, fast_processes

from buffer_engine.errors import StoreError
from buffer_engine.store import LocalStore, open_store
from buffer_engine.store.base import ReadPolicy

STRACE = shutil.which("strace")
ROUNDS = 3


def work(folder: str, acknowledgements: str, ready: multiprocessing.connection.Connection) -> None:
    """Write, train, compact and score, each twice at most; what is acknowledged and what is refused is logged."""
    done = Acknowledgements(Path(acknowledgements))
    ready.send(None)
    ready.recv()  # until the tracer is there

    def attempt(what: Callable[[], object], *said: object) -> None:
        for _ in range(2):
            try:
                what()
            except StoreError as error:
                done.say("refused", str(error).replace("\n", " "))
            else:
                done.say(*said)
                return

    opened: list[LocalStore] = []
    attempt(lambda: opened.append(open_store(folder, durability="power")), "opened")
    if not opened:
        return
    (store,) = opened
    for number in range(ROUNDS):
        pair = [2 * number, 2 * number + 1]
        rows = {"rollouts": rollouts(pair), "decisions": decisions(pair)}
        attempt(lambda rows=rows: store.append_all(rows), "rows", *pair)
    attempt(lambda: train(store), "committed")
    attempt(lambda: store.compact(everything=True, grace_seconds=0.0), "compacted")
    attempt(lambda: store.append("scores", table("scores", [score("x0")])), "scored")
    store.close()
    done.say("end")


def train(store: LocalStore) -> None:
    """Reserve, prepare and commit one batch, or what of that is left to do."""
    status = {record.batch_id: record.status for record in store.batches(RUN)}.get("b1")
    if status not in ("prepared", "committed"):
        held = store.reserve(ReadPolicy.model_validate({"rows": 4}), run_id=RUN, batch_id="b1", model_version=0)
        if held is None:
            return
        batch, rows = manifest("b1", 1, held.experience_ids)
        store.prepare_batch(held, step=1, batch=batch, rows=rows)
    store.commit_batch("b1", step=1, model=model(1))


def failing(folder: Path, acknowledgements: Path, call: str, error: str, which: int) -> bool:
    """Do the work with the `which`-th use of a system call failing; whether there was such a use.

    Raises:
        PermissionError: this user may not trace processes.
    """
    here, there = multiprocessing.connection.Pipe()
    process = fast_processes().Process(target=work, args=(str(folder), str(acknowledgements), there))
    process.start()
    here.recv()
    trace = acknowledgements.with_suffix(".trace")
    tracer = subprocess.Popen(
        [str(STRACE), "-f", "-qq", "-o", str(trace), "-e", f"trace={call}", "-e",
         f"inject={call}:error={error}:when={which}", "-p", str(process.pid)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    status = Path(f"/proc/{process.pid}/status")
    while "TracerPid:\t0\n" in status.read_text():
        if tracer.poll() is not None:
            process.kill()
            process.join()
            assert tracer.stderr is not None
            raise PermissionError(tracer.stderr.read())
        time.sleep(0.002)
    here.send(None)
    process.join(60)
    _, said = tracer.communicate(timeout=60)
    assert process.exitcode == 0, f"{call} {which}: exit code {process.exitcode}; {said}"
    return "(INJECTED)" in trace.read_text()


def words(acknowledgements: Path, word: str) -> list[str]:
    """The rest of each line that begins with `word`."""
    lines = acknowledgements.read_text().splitlines()
    return [rest for line in lines for said, _, rest in [line.partition(" ")] if said == word]
