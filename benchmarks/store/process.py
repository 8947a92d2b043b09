"""A process of its own for the measures that need several: `python -m benchmarks.store.process write|watch …`.

It makes its data, says `ready`, waits for a line on stdin so that all begin together, and prints one line of JSON.
Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.store.data import rollout_rows
from benchmarks.store.peers import KINDS


def main(words: list[str]) -> None:
    """`write PEER FOLDER SEED COMMITS ROWS` or `watch PEER FOLDER STEP COMMITS`."""
    work, name, folder, *numbers = words
    counts = [int(number) for number in numbers]
    said = write(name, Path(folder), *counts) if work == "write" else watch(name, Path(folder), *counts)
    print(json.dumps(said), flush=True)


def write(name: str, folder: Path, seed: int, commits: int, rows: int) -> dict[str, object]:
    """Append `commits` times `rows` rows."""
    data = [rollout_rows(rows, seed=seed, first=rows * at) for at in range(commits)]
    peer = KINDS[name].open(folder)
    _wait()
    begin, cpu = time.monotonic(), time.process_time()
    for part in data:
        peer.append(part)
    end = time.monotonic()
    peer.close()
    return {"begin": begin, "end": end, "cpu": time.process_time() - cpu}


def watch(name: str, folder: Path, step: int, commits: int) -> dict[str, object]:
    """When each of `commits` appends of `step` rows was first seen; looks about every half millisecond."""
    peer = KINDS[name].open(folder)
    before = peer.count()
    _wait()
    seen: list[float] = []
    deadline = time.monotonic() + 60
    while len(seen) < commits and time.monotonic() < deadline:
        arrived = (peer.count() - before) // step
        seen += [time.monotonic()] * (arrived - len(seen))
        time.sleep(0.0005)
    peer.close()
    return {"seen": seen}


def _wait() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1:])
