"""Functions that the tests of `python_row` and `python_batch` call in other processes."""

from __future__ import annotations

import os
import time
from typing import Any


def short(row: dict[str, Any]) -> bool | str:
    text = row["response"]
    if text == "":
        return "empty"
    return len(text) < 4


def length(row: dict[str, Any]) -> float | None:
    print("this goes to standard error")
    return None if row["response"] == "?" else float(len(row["response"]))


def lengths(rows: list[dict[str, Any]]) -> list[int]:
    return [len(row["response"]) for row in rows]


def moody(row: dict[str, Any]) -> Any:
    what = row["response"]
    if what == "raise":
        raise ValueError("no")
    if what == "sleep":
        time.sleep(60)
    if what == "end":
        os._exit(3)
    return {"text": "seven", "inf": 1e999, "set": {1}}.get(what, 1.0)


def moody_batch(rows: list[dict[str, Any]]) -> list[Any]:
    return [moody(row) for row in rows]


def miscount(rows: list[dict[str, Any]]) -> list[Any]:
    return [True] * (len(rows) + 1)
