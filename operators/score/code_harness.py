"""What runs tests inside the sandbox: every test in a process of its own, one line of JSON for each.

Only its source text is used, so it imports nothing of this package. The process that reports cannot be read or written
by the processes that run answers: it is not dumpable, so the kernel keeps its memory and its open files from them. An
answer passes when its process comes to the end of the test and says the word that was drawn for it; leaving early does
not do.
"""

import ctypes
import json
import os
import select
import signal
import sys
import time

_MOST = 2000


def main() -> None:
    """Read the order from order.json and report on standard output."""
    if ctypes.CDLL(None).prctl(4, 0, 0, 0, 0):  # PR_SET_DUMPABLE
        raise OSError("prctl failed")
    with open("order.json", encoding="utf-8") as file:
        order = json.load(file)
    for test in order["tests"]:
        said = judge(order["source"], test, order["seconds"])
        os.write(1, json.dumps(said).encode() + b"\n")


def judge(source: str, test: str, seconds: float) -> "list[object]":
    """[passed, what went wrong]."""
    word = os.urandom(16).hex()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            os.write(write, attempt(source, test, word).encode("utf-8", "replace")[:_MOST])
        finally:
            os._exit(0)
    os.close(write)
    said, in_time = hear(read, time.monotonic() + seconds)
    os.close(read)
    for kill in (os.killpg, os.kill):
        try:
            kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    _, status = os.waitpid(child, 0)
    if said == word.encode():
        return [True, ""]
    if not in_time:
        return [False, f"timeout: longer than {seconds:g} s"]
    if os.WIFSIGNALED(status) and not said and os.WTERMSIG(status) == signal.SIGXCPU:
        return [False, "timeout: too much processor time"]
    return [False, said.decode("utf-8", "replace") or "the answer ended the process before the test was over"]


def attempt(source: str, test: str, word: str) -> str:
    """The word, or what went wrong."""
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(source, "answer.py", "exec"), names)
        exec(compile(test, "test.py", "exec"), names)
    except MemoryError:
        return "MemoryError"
    except BaseException as error:  # noqa: BLE001 - whatever an answer raises fails its test
        sys.settrace(None)
        return f"{type(error).__name__}: {error}".rstrip(": \n")
    return word


def hear(pipe: int, end: float) -> "tuple[bytes, bool]":
    """What the other side says until it closes the pipe, and whether it did so in time."""
    said = b""
    while len(said) < _MOST:
        ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return said, False
        chunk = os.read(pipe, _MOST)
        if not chunk:
            break
        said += chunk
    return said, True


if __name__ == "__main__":
    main()
