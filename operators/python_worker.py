"""The process that calls a person's function: one JSON request a line in, one JSON reply a line out.

Whatever the function prints goes to standard error, and the process ends itself a little after its time is over, so
that it cannot outlive a parent that was killed meanwhile.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

_GRACE_SECONDS = 5.0


def main() -> None:
    """Answer requests until standard input closes."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the function prints must not mix with the replies
    known: dict[str, Callable[[Any], Any]] = {}
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        faulthandler.dump_traceback_later(request["timeout"] + _GRACE_SECONDS, exit=True, file=sys.stderr)
        text = json.dumps(_answer(known, request))
        faulthandler.cancel_dump_traceback_later()
        print(text, file=replies, flush=True)


def _answer(known: dict[str, Callable[[Any], Any]], request: dict[str, Any]) -> dict[str, Any]:
    """`{"values": […]}`, or `{"error": text}` when the function cannot be found, raises, or answers something odd."""
    try:
        name, rows = request["function"], request["rows"]
        if name not in known:
            module, _, attribute = name.partition(":")
            known[name] = getattr(importlib.import_module(module), attribute)
        values = known[name](rows) if request["batched"] else [known[name](row) for row in rows]
        values = [value.item() if hasattr(value, "item") else value for value in values]
        if len(values) != len(rows):
            return {"error": f"{name} gave {len(values)} answers for {len(rows)} rows"}
        json.dumps(values)
    except Exception as error:  # noqa: BLE001 - the reply carries it to the rows it belongs to
        return {"error": f"{type(error).__name__}: {error}"}
    return {"values": values}


if __name__ == "__main__":
    main()
