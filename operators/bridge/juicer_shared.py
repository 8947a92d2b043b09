"""One Data-Juicer process for all operators that use the same interpreter: starting one costs seconds and memory.

Operators of one plan run one after the other, so they lose nothing by sharing; a lock keeps two plans of one program
apart. A process that is lost is started anew by whoever needs it next, and every operator is made in it again.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

from operators.bridge.juicer_process import JuicerProcess

_Key = tuple[int, str, bool]


@dataclass(slots=True)
class SharedProcess:
    """A process that may not be running at the moment.

    Attributes:
        lock: held while the process is asked.
        process: None before it is needed and after it was lost.
    """

    python: str
    network: bool
    lock: threading.Lock = field(default_factory=threading.Lock)
    process: JuicerProcess | None = None
    users: int = 0

    def running(self) -> JuicerProcess:
        """The process, started if need be; the lock is held."""
        if self.process is None:
            self.process = JuicerProcess(self.python, network=self.network)
        return self.process


_shared: dict[_Key, SharedProcess] = {}
_guard = threading.Lock()


def borrow(python: str, *, network: bool) -> SharedProcess:
    """The shared process of an interpreter; to be given back."""
    with _guard:
        # A forked child must not talk through the pipes of its parent.
        shared = _shared.setdefault((os.getpid(), python, network), SharedProcess(python, network))
        shared.users += 1
        return shared


def give_back(shared: SharedProcess) -> None:
    """Say that one user is done; the last one ends the process."""
    with _guard:
        shared.users -= 1
        if shared.users > 0:
            return
        _shared.pop((os.getpid(), shared.python, shared.network), None)
    with shared.lock:
        if shared.process is not None:
            shared.process.close()
            shared.process = None
