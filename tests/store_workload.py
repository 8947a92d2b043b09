"""A writer and trainer in one process, to be killed: what it was promised goes to an acknowledgement file.

Run through `multiprocessing`, so that a fresh process costs a fork and not an import of Arrow.
"""

from __future__ import annotations

import multiprocessing.context
import os
import signal
import sys
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType

from store_rows import child_environment, decisions, manifest, model, rollouts

from buffer_engine.store import LocalStore, open_store
from buffer_engine.store.base import ReadPolicy

GROUPS_PER_ROUND = 2


def fast_processes() -> multiprocessing.context.ForkServerContext:
    """A way to start processes that costs a fork: the server that forks them has imported this module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "store_workload", "psycopg"])
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = child_environment()["PYTHONPATH"]  # the server looks for the module there, once
    try:
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    return context


def die_after(calls: int) -> None:
    """Let this process kill itself at its `calls`-th call of a C function from now on."""
    left = calls

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if event == "c_call":
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


class Acknowledgements:
    """Lines in a file that survive the death of the process (not of the machine)."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(self, *words: object) -> None:
        line = (" ".join(map(str, words)) + "\n").encode()
        written = os.write(self._handle, line)
        assert written == len(line), "the disk with the acknowledgements is full"


def live(folder: str, acknowledgements: str, calls: int, rounds: int) -> None:
    """Resume where the last process stopped, then go on for `rounds` rounds or until it dies."""
    if calls:
        die_after(calls)
    done = Acknowledgements(Path(acknowledgements))
    with open_store(folder, durability="process") as store, store.open_run("run"):
        resume(store, done)
        for _ in range(rounds):
            explore(store, done)
            train(store, done)
    done.say("finished")


def resume(store: LocalStore, done: Acknowledgements) -> None:
    for record in store.batches("run"):
        if record.status == "prepared":
            assert record.step is not None
            commit(store, done, record.batch_id, record.step)
    last = store.cursor("rounds") - 1
    if last >= 0:  # the last append may have been acknowledged or not: repeating it must be harmless
        receipt = store.append("rollouts", rollouts(numbers_of(last)), cursors={"rounds": last + 1})
        assert receipt.appended["rollouts"] == 0


def numbers_of(round_number: int) -> range:
    return range(round_number * 2 * GROUPS_PER_ROUND, (round_number + 1) * 2 * GROUPS_PER_ROUND)


def explore(store: LocalStore, done: Acknowledgements) -> None:
    number = store.cursor("rounds")
    numbers = numbers_of(number)
    store.append("rollouts", rollouts(numbers), cursors={"rounds": number + 1})
    done.say("rows", *numbers)
    undecided = [int(one[1:]) for one in store.rollout_state(status="new").column("experience_id").to_pylist()]
    store.append("decisions", decisions(undecided))
    done.say("kept", *undecided)


def train(store: LocalStore, done: Acknowledgements) -> None:
    # as a trainer does: a manifest that was released keeps its id, so the next attempt takes another
    step = 1 + max([record.step or 0 for record in store.batches("run") if record.status == "committed"], default=0)
    reservation = store.reserve(ReadPolicy(rows=4), run_id="run", batch_id=f"b{step}", model_version=step - 1)
    if reservation is None:
        return
    batch, rows = manifest(reservation.batch_id, step, reservation.experience_ids)
    store.prepare_batch(reservation, step=step, batch=batch, rows=rows)
    done.say("prepared", step)
    commit(store, done, reservation.batch_id, step)


def commit(store: LocalStore, done: Acknowledgements, batch_id: str, step: int) -> None:
    store.commit_batch(batch_id, step=step, model=model(step))
    done.say("committed", step)


def write_alone(folder: str, worker: int, appends: int) -> None:
    """Append `appends` times: rows of this worker's own, and one that all workers write."""
    with open_store(folder, durability="process") as store:
        for number in range(appends):
            own = 1_000_000 * worker + number
            store.append("rollouts", rollouts([own, 500 + number], group_size=1), cursors={f"w{worker}": number + 1})


def reserve_all(folder: str, worker: int) -> None:
    """Train batches of four rows until nothing is left."""
    with open_store(folder, durability="process") as store:
        step = 1
        while True:
            name = f"w{worker}-{step}"
            found = store.reserve(ReadPolicy(rows=4), run_id="run", batch_id=name, model_version=0)
            if found is None:
                return
            batch, rows = manifest(name, step, found.experience_ids)
            store.prepare_batch(found, step=step, batch=batch, rows=rows)
            store.commit_batch(name, step=step)
            step += 1
