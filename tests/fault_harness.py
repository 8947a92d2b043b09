"""Many processes on one store, killed and started again by a seeded schedule, held to what they were promised."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pyarrow.compute as pc
from backends import open_store
from fault_roles import GROUP, NEVER, RUN, Death, drain, open_for_test, play, points_of, promised
from store_workload import fast_processes

from buffer_engine.store.base import Finding


@dataclass(slots=True)
class _Slot:
    role: str
    number: int
    process: ForkServerProcess | None = None
    kill_at: float = float("inf")
    how: str = ""


@dataclass(slots=True)
class Tally:
    """What happened.

    Attributes:
        kills: by role.
        ways: by how the process died: timed, at a call, or the named step.
    """

    kills: Counter[str] = field(default_factory=Counter[str])
    ways: Counter[str] = field(default_factory=Counter[str])
    checks: int = 0
    rows: int = 0
    batches: int = 0


class Harness:
    """One store, its processes and their logs."""

    def __init__(
        self, folder: Path, cast: Mapping[str, int], *, seed: int, pause: float = 0.004, slow: int = 1
    ) -> None:
        """Play each role of `cast` that many times.

        Args:
            pause: seconds between two turns of a process.
            slow: how many times longer everything takes, so that processes live long enough to do something.
        """
        self._slow = slow
        self.store = folder / "store"
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.tally = Tally()
        self._pause = pause
        self._dice = random.Random(seed)
        self._context = fast_processes()
        self._slots = [_Slot(role, number) for role, count in cast.items() for number in range(count)]
        self._checked: dict[Path, int] = {}
        self._known: set[str] = set()
        open_store(self.store, durability="process").close()  # of the kind that the test is about

    def run(self, *, kills: int = 0, seconds: float = 0.0) -> None:
        """Until so many processes were killed (each started again), one of every role among them, or for so long."""
        until = time.monotonic() + seconds
        spared = {slot.role for slot in self._slots} if kills else set[str]()
        try:
            while sum(self.tally.kills.values()) < kills or spared - set(self.tally.kills) or time.monotonic() < until:
                for slot in self._slots:
                    if slot.process is None:
                        self._start(slot, killing=kills > 0)
                self._wait()
        finally:
            (self.logs / "stop").touch()
            self._stop()

    def check_promises(self) -> None:
        """Everything promised since the last check is in the store, now that somebody has died."""
        new: dict[str, list[str]] = {}
        for path in sorted(self.logs.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._checked.get(path, 0))
                text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._checked[path] = self._checked.get(path, 0) + len(complete)
            for line in complete.decode().splitlines():
                word, *rest = line.split()
                new.setdefault(word, []).extend(rest)
        with open_for_test(self.store, read_only=True) as store:
            rows = [f"x{number}" for number in new.get("rows", [])]
            assert set(store.runs_of(rows)) == set(rows), "an acknowledged row is gone"
            kept = {f"x{number}" for number in new.get("kept", [])}
            if kept:
                state = store.rollout_state(status="kept").column("experience_id")
                assert kept <= set(state.to_pylist()), "an acknowledged verdict is gone"
            status = {record.batch_id: record.status for record in store.batches(RUN)}
            for batch_id in new.get("prepared", []):
                assert status[batch_id] in ("prepared", "committed"), f"the manifest of {batch_id} is gone"
            for batch_id in new.get("committed", []):
                assert status[batch_id] == "committed", f"the commit of {batch_id} is gone"
        self.tally.checks += 1

    def finish(self, *, drained: bool = True) -> list[Finding]:
        """Finish the work without kills, check every promise and the whole store; returns what `verify` found."""
        trainers = [slot.number for slot in self._slots if slot.role == "trainer"]
        if drained and trainers:
            drain(self.store, self.logs, trainers)
        self.check_promises()
        with open_for_test(self.store) as store:
            ids: list[str] = store.table("rollouts", columns=["experience_id"]).column(0).to_pylist()
            assert len(set(ids)) == len(ids), "a row is there twice"
            missing = {f"x{number}" for number in promised(self.logs, "rows")} - set(ids)
            assert not missing, f"lost: {sorted(missing)[:3]}"
            state = {row["experience_id"]: row for row in store.rollout_state().to_pylist()}
            records = store.batches(RUN)
            committed = {record.batch_id for record in records if record.status == "committed"}
            rows = store.table("batch_rows", columns=["batch_id", "experience_id"]).to_pylist()
            trained = Counter(row["experience_id"] for row in rows if row["batch_id"] in committed)
            assert set(trained.values()) <= {1}, "a row was trained twice"
            assert {one: row["uses"] for one, row in state.items() if row["uses"]} == dict(trained)
            if drained and trainers:
                left = {record.status for record in records} - {"committed", "released"}
                assert not left, f"batches are left {left}"
                waiting = [one for one, row in state.items() if row["status"] == "kept" and not row["uses"]]
                assert not waiting, f"never trained: {waiting[:3]}"
            events = store.table("events")
            assert pc.sum(pc.equal(events.column("kind"), "damaged_frame")).as_py() in (None, 0)
            self.tally.rows, self.tally.batches = len(ids), len(committed)
            assert len(ids) % GROUP == 0
            return store.verify()

    def _start(self, slot: _Slot, *, killing: bool) -> None:
        death, slot.kill_at, slot.how = NEVER, float("inf"), ""
        if killing and slot.role == "reader":  # it writes nothing, and needs time to see something
            slot.kill_at, slot.how = time.monotonic() + self._slow * self._dice.uniform(0.2, 1.5), "timed"
        elif killing:
            way = self._dice.random()
            if way < 0.5:
                longest = 1.0 if slot.role == "compactor" else 0.3
                slot.kill_at = time.monotonic() + self._slow * self._dice.uniform(0.01, longest)
                slot.how = "timed"
            elif way < 0.75 and slot.role != "compactor":
                death = Death(calls=self._dice.randrange(20, 6_000 * self._slow))
                slot.how = "at a call"
            else:
                point = self._dice.choice(points_of(slot.role, self.store))
                most = 3 if slot.role == "compactor" else max(20 // self._slow, 3)
                death = Death(point=point, count=self._dice.randrange(1, most), after=self._dice.random() < 0.5)
                slot.how = point
            if death is not NEVER:  # a role with nothing to do would never get there
                slot.kill_at = time.monotonic() + 2.0 * self._slow
        arguments = (slot.role, slot.number, str(self.store), str(self.logs), death, self._pause)
        slot.process = self._context.Process(target=play, args=arguments)
        slot.process.start()

    def _wait(self) -> None:
        """Until somebody ends or has to be killed; kills, and checks what was promised to the dead."""
        soon = min((slot.kill_at for slot in self._slots), default=float("inf"))
        patience = min(max(soon - time.monotonic(), 0.0), 0.25)
        alive = {slot.process.sentinel: slot for slot in self._slots if slot.process is not None}
        connection.wait(list(alive), timeout=patience)
        now = time.monotonic()
        died = False
        for slot in alive.values():
            process = slot.process
            assert process is not None
            if process.is_alive() and slot.kill_at <= now:
                process.kill()
                process.join()
                slot.how = "timed"
            if not process.is_alive():
                process.join()
                assert process.exitcode == -signal.SIGKILL, self._failure(slot, process.exitcode)
                self.tally.kills[slot.role] += 1
                self.tally.ways[slot.how] += 1
                slot.process, slot.kill_at, died = None, float("inf"), True
        if died:
            self.check_promises()

    def _stop(self) -> None:
        for slot in self._slots:
            if slot.process is not None:
                slot.process.join(20)
                if slot.process.is_alive():
                    slot.process.kill()
                    slot.process.join()
                code, slot.process = slot.process.exitcode, None
                assert code in (0, -signal.SIGKILL), self._failure(slot, code)

    def _failure(self, slot: _Slot, code: int | None) -> str:
        error = self.logs / f"{slot.role}-{slot.number}.error"
        said = error.read_text() if error.exists() else ""
        return f"{slot.role} {slot.number} ended with {code}\n{said}"
