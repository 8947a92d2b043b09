"""The process that compares mathematical answers: one JSON request a line in, one JSON reply a line out.

math-verify bounds its time with signals, which work only in a main thread and not inside C code; here its own limits
are off, and whoever started the process ends it when a row takes too long. The process also ends itself a little
later, so that it cannot outlive a parent that was killed meanwhile.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import logging
import os
import sys
from typing import Any

_GRACE_SECONDS = 5.0


def main() -> None:
    """Answer requests until standard input closes."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not mix with the replies
    logging.disable(logging.WARNING)
    importlib.import_module("math_verify")  # here, so that its seconds do not count as the first row's

    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        faulthandler.dump_traceback_later(request["timeout"] + _GRACE_SECONDS, exit=True, file=sys.stderr)
        reply = compare(request["gold"], request["answer"])
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(reply), file=replies, flush=True)


def compare(gold: str, answer: str) -> dict[str, Any]:
    """`{"value": 0.0 | 1.0}`, or `{"error": text}` when the gold answer itself cannot be read."""
    from math_verify import parse, verify

    try:
        wanted = parse(_anchored(gold), parsing_timeout=0)
        if not wanted:
            return {"error": f"the gold answer {gold!r} is not mathematics that math-verify can read"}
        found = parse(answer, parsing_timeout=0)
        return {"value": float(bool(found) and verify(wanted, found, timeout_seconds=None))}
    except Exception as error:  # noqa: BLE001 - the reply carries it to the row it belongs to
        return {"error": f"{type(error).__name__}: {error}"}


def _anchored(gold: str) -> str:
    """Gold answers usually come as bare LaTeX, which math-verify reads only between dollar signs."""
    return gold if any(mark in gold for mark in ("$", r"\boxed", r"\(", r"\[")) else f"${gold}$"


if __name__ == "__main__":
    main()
