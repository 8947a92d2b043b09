"""A process of its own for each opened peer: `python -m benchmarks.store.agent PEER FOLDER`, in the peer's environment.

Requests come as one line of JSON on stdin, answers go as one line to what was stdout when it began; whatever a library
prints goes to stderr. Rows travel in Arrow files. Clocks run here, around the peer's own work only. Times that are
compared between processes are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.store import shared
from benchmarks.store.clock import timed
from benchmarks.store.limits import synced_file
from benchmarks.store.peers import KINDS, PAYLOAD, Peer, Unsupported

Answer = dict[str, Any]


class Agent:
    """One opened peer and what is asked of it; every public method is a request."""

    def __init__(self, name: str, folder: Path, answer: Callable[[Answer], None]) -> None:
        self._kind = KINDS[name]
        self._folder = folder
        self._answer = answer
        self._loaded: list[Any] = []
        folder.mkdir(parents=True, exist_ok=True)
        opening = self._kind.adapter()
        begin = time.perf_counter()
        self._peer: Peer = opening(folder)
        self._opened = time.perf_counter() - begin

    def opened(self) -> Answer:
        """How long opening took, without imports."""
        return {"seconds": self._opened}

    def append(self, files: list[str], objects: bool = False, budget: float = 60.0, disk: bool = False) -> Answer:
        """Append the rows of each file; `disk` adds a plain write and sync of as many bytes after each of them."""
        walls: list[float] = []
        cpus: list[float] = []
        plain: list[float] = []
        rows = 0
        size = shared.read(Path(files[0])).nbytes
        with synced_file(self._folder.parent, size, len(files)) if disk else nullcontext() as write_and_sync:
            for name in files:
                given = shared.read(Path(name))
                prepared = self._peer.objects(given) if objects else self._peer.prepare(given)
                work = self._peer.append_objects if objects else self._peer.append
                with timed(family=self._kind.alone) as clock:
                    work(prepared)
                rows += given.num_rows
                walls.append(clock.wall)
                cpus.append(clock.cpu)
                if write_and_sync is not None:
                    with timed() as clock:
                        write_and_sync()
                    plain.append(clock.wall)
                if sum(walls) > budget:
                    break
        return {"walls": walls, "cpus": cpus, "rows": rows, "plain": plain, "asked": len(files)}

    def load(self, files: list[str]) -> Answer:
        """Make rows ready, so that several processes can begin at the same time."""
        self._loaded = [self._peer.prepare(shared.read(Path(name))) for name in files]
        return {}

    def append_loaded(self, budget: float) -> Answer:
        """Append what `load` made ready."""
        begin, done = time.monotonic(), 0
        with timed(family=self._kind.alone) as clock:
            for prepared in self._loaded:
                self._peer.append(prepared)
                done += 1
                if time.monotonic() - begin > budget:
                    break
        return {"begin": begin, "end": time.monotonic(), "cpu": clock.cpu, "done": done}

    def batch(self, batches: list[list[str]], budget: float = 60.0) -> Answer:
        """Each list of ids as padded arrays, and how long a copy of those arrays takes."""
        walls: list[float] = []
        cpus: list[float] = []
        copies: list[float] = []
        firsts: list[list[int] | None] = []
        for ids in batches:
            with timed(family=self._kind.alone) as clock:
                blocks = self._peer.batch(ids)
            walls.append(clock.wall)
            cpus.append(clock.cpu)
            if set(blocks) != set(PAYLOAD) or len(blocks["token_ids"]) != len(ids):
                raise AssertionError(
                    f"a batch of {len(ids)} rows came as { ({k: v.shape for k, v in blocks.items()}) }"
                )
            firsts.append(blocks["token_ids"][0].tolist() if self._kind.by_id else None)
            targets = [np.empty_like(block) for block in blocks.values()]
            for target in targets:
                target.fill(0)  # its pages exist before the clock runs
            with timed() as clock:
                for target, block in zip(targets, blocks.values(), strict=True):
                    np.copyto(target, block)
            copies.append(clock.wall)
            if sum(walls) > budget:
                break
        return {"walls": walls, "cpus": cpus, "copies": copies, "firsts": firsts}

    def score(self, files: list[str], change: bool = False) -> Answer:
        """Store the scores of each file; `change` makes them the reward that readers of the rollouts see."""
        work = self._peer.reward if change else self._peer.score
        walls: list[float] = []
        cpus: list[float] = []
        for name in files:
            scores = shared.read(Path(name))
            with timed(family=self._kind.alone) as clock:
                work(scores)
            walls.append(clock.wall)
            cpus.append(clock.cpu)
        return {"walls": walls, "cpus": cpus}

    def group_by(self, repeats: int) -> Answer:
        """The aggregation, once before the clock runs."""
        found = self._peer.group_by()
        walls: list[float] = []
        cpus: list[float] = []
        for _ in range(repeats):
            with timed(family=self._kind.alone) as clock:
                found = self._peer.group_by()
            walls.append(clock.wall)
            cpus.append(clock.cpu)
        counts = [int(str(row[2])) for row in found] if found and len(found[0]) == 4 else None
        return {"walls": walls, "cpus": cpus, "rows": None if counts is None else sum(counts)}

    def keep(self, ids: list[str]) -> Answer:
        """Let these rollouts be trained on."""
        self._peer.keep(ids)
        return {}

    def take(self, rows: int, times: int, who: str) -> Answer:
        """Take `times` batches of `rows` rows, the first before the clock runs."""
        walls: list[float] = []
        taken = list(self._peer.take(rows, 1, who))
        for number in range(2, times + 1):
            with timed() as clock:
                taken += self._peer.take(rows, number, who)
            walls.append(clock.wall)
        return {"walls": walls, "taken": taken}

    def watch(self, step: int, commits: int) -> Answer:
        """When each of `commits` appends of `step` rows was first seen; looks about every half millisecond."""
        before = self._peer.count()
        self._answer({"ready": True})
        seen: list[float] = []
        deadline = time.monotonic() + 60
        while len(seen) < commits and time.monotonic() < deadline:
            arrived = (self._peer.count() - before) // step
            seen += [time.monotonic()] * (arrived - len(seen))
            time.sleep(0.0005)
        return {"seen": seen}

    def slow_append(self, files: list[str], pause: float) -> Answer:
        """Append each file after a pause; when each was acknowledged."""
        acknowledged: list[float] = []
        for name in files:
            prepared = self._peer.prepare(shared.read(Path(name)))
            time.sleep(pause)
            self._peer.append(prepared)
            acknowledged.append(time.monotonic())
        return {"acknowledged": acknowledged}

    def fill(self, block: str, first: int, until: int, budget: float) -> Answer:
        """Append narrow rows `first` to `until` (not included) in blocks; stops when the budget of seconds is used."""
        rows = shared.read(Path(block))
        spent = 0.0
        while first < until and spent < budget:
            part = shared.renamed(rows.slice(0, min(rows.num_rows, until - first)), first)
            prepared = self._peer.prepare(part)
            with timed() as clock:
                self._peer.append(prepared)
            spent += clock.wall
            first += part.num_rows
        return {"rows": first, "seconds": spent}

    def count(self) -> Answer:
        """Rows by the cheapest way."""
        return {"rows": self._peer.count()}

    def ids(self) -> Answer:
        """All ids."""
        return {"ids": self._peer.ids()}

    def compact(self) -> Answer:
        """Compact what is there."""
        with timed(family=self._kind.alone) as clock:
            self._peer.compact()
        return {"wall": clock.wall, "cpu": clock.cpu}

    def close(self) -> Answer:
        """Close the peer; the process ends afterwards."""
        self._peer.close()
        return {}


def main(words: list[str]) -> None:
    """Serve until `close` or the end of stdin."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(said: Answer) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    def attempt(work: Callable[[], Answer]) -> None:
        try:
            answer(work())
        except Unsupported as error:
            answer({"unsupported": str(error)})
        except Exception as error:  # goes to the process that asked, which puts it into the table
            answer({"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})

    agent: Agent | None = None

    def open_it() -> Answer:
        nonlocal agent
        agent = Agent(words[0], Path(words[1]), answer)
        return agent.opened()

    attempt(open_it)
    if agent is None:
        return
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        work = getattr(agent, request.pop("do"))
        attempt(lambda work=work, request=request: work(**request))
        if work.__name__ == "close":
            return


if __name__ == "__main__":
    main(sys.argv[1:])
