"""A recipe of Data-Juicer as a list of operators here.

An operator becomes the native one only where both give the same answer to every text; otherwise it stays Data-Juicer's,
called by `data_juicer`. Whatever cannot be taken over is said, with what comes near.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from buffer_engine.errors import ConfigError
from operators.base import OperatorConfig
from operators.bridge.juicer_table import MANAGED_ARGS, juicer_table
from operators.registry import OPERATORS

_EMAIL = r"[A-Za-z0-9.\-+_]+@[a-z0-9.\-+_]+\.[a-z]+"
_IP = (
    r"(?:(?:1[0-9][0-9]\.)|(?:2[0-4][0-9]\.)|(?:25[0-5]\.)|(?:[1-9][0-9]\.)|(?:[0-9]\.)){3}"
    r"(?:(?:1[0-9][0-9])|(?:2[0-4][0-9])|(?:25[0-5])|(?:[1-9][0-9])|(?:[0-9]))|"
    r"([\da-fA-F]{1,4}:){7}[\da-fA-F]{1,4}"
)
_SHORTEST = 10  # what text_length_filter takes when nothing is said

NEAR: Mapping[str, str] = {
    "document_deduplicator": "exact_dedup, which counts blanks at the ends as a difference unless normalize says ws",
    "document_minhash_deduplicator": "near_dedup, which confirms by exact Jaccard similarity",
    "document_simhash_deduplicator": "near_dedup",
    "random_selector": "balance_sample, drawn by hash of the id",
    "topk_specified_field_selector": "curriculum with method: top_k",
    "range_specified_field_selector": "curriculum with method: band",
    "language_id_score_filter": "language_filter, whose model is in its package",
    "token_num_filter": "length_filter with unit: token",
    "flagged_words_filter": "polars with a word list, or text_quality_filter",
    "sentence_split_mapper": "replace_pattern",
}
"""What is like an operator without being the same; told, never put in its place."""


@dataclass(frozen=True, slots=True)
class ImportedRecipe:
    """What became of a recipe.

    Attributes:
        operators: entries for `operators:`, each accepted by its configuration.
        missing: what was not taken over: its place, and why.
        remarks: what was taken over but should be looked at, and what was left out because it has no meaning here.
    """

    operators: tuple[Mapping[str, Any], ...]
    missing: tuple[str, ...]
    remarks: tuple[str, ...]


def import_recipe(recipe: object, *, column: str = "response") -> ImportedRecipe:
    """Translate a recipe.

    Args:
        recipe: what its YAML says.
        column: the text column that its operators work on.
    Raises:
        ConfigError: it is no mapping with a list `process`.
    """
    if not isinstance(recipe, Mapping):
        raise ConfigError.one("a recipe of Data-Juicer is a mapping with a list `process`")
    keys = cast("Mapping[str, Any]", recipe)
    process = keys.get("process")
    if not isinstance(process, list):
        raise ConfigError.one("the recipe has no list `process`", path="process")
    result = _Importer(column)
    for key, value in keys.items():
        if key != "process":
            result.remarks.append(f"{key}: {value!r:.80} is about files or how Data-Juicer runs; left out")
    for place, step in enumerate(cast("list[Any]", process)):
        result.take(place, step)
    return ImportedRecipe(tuple(result.operators), tuple(result.missing), tuple(result.remarks))


class _Importer:
    def __init__(self, column: str) -> None:
        self._column = column
        self._names: set[str] = set()
        self.operators: list[Mapping[str, Any]] = []
        self.missing: list[str] = []
        self.remarks: list[str] = []

    def take(self, place: int, step: object) -> None:
        """Translate one step."""
        if isinstance(step, str):
            step = {step: None}
        if not isinstance(step, Mapping) or len(cast("Mapping[str, Any]", step)) != 1:
            self.missing.append(f"process[{place}]: {step!r:.80} is not one operator with its arguments")
            return
        ((op, given),) = cast("Mapping[str, Any]", step).items()
        if given is not None and not isinstance(given, Mapping):
            self.missing.append(f"process[{place}] {op}: its arguments are no mapping but {given!r:.80}")
            return
        args = dict(cast("Mapping[str, Any]", given or {}))
        where = f"process[{place}] {op}"
        managed = {name: args.pop(name) for name in MANAGED_ARGS if name in args}
        key = managed.pop("text_key", "text")
        if managed:
            self.remarks.append(f"{where}: {', '.join(managed)} is about Data-Juicer's executor; left out")
        if key != "text":
            self.remarks.append(f"{where}: text_key {key!r} is now column {self._column!r}; change it if need be")
        reason = _obstacle(op)
        if reason:
            self.missing.append(f"{where}: {reason}{_near(op)}")
            return
        entry = self._entry(op, args, where)
        try:
            config: OperatorConfig = OPERATORS.load(entry["type"]).Config.model_validate(entry)
        except ValidationError as error:
            said = "; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())
            self.missing.append(f"{where}: {said}")
            return
        self._names.add(config.name)
        self.operators.append(entry)

    def _entry(self, op: str, args: Mapping[str, Any], where: str) -> dict[str, Any]:
        native = NATIVE[op](args, self._column) if op in NATIVE else None
        if native is not None:
            self.remarks.append(f"{where}: native {native['type']}, with the same answer to every text")
            return {"type": native.pop("type"), "id": self._id(op), **native}
        entry: dict[str, Any] = {"type": "data_juicer", "id": self._id(op), "op": op, "column": self._column}
        if args:
            entry["args"] = dict(args)
        if op not in juicer_table().ops:
            entry["effect"] = "filter" if op.endswith("_filter") else "map"
            self.remarks.append(
                f"{where}: not known to run offline; it may need packages, models or a service, and its statistics "
                f"are not stored unless `stats` names them{_near(op)}"
            )
        return entry

    def _id(self, op: str) -> str:
        name, count = op, 1
        while name in self._names:
            count += 1
            name = f"{op}_{count}"
        return name


def _obstacle(op: str) -> str:
    """Why an operator cannot be taken over; empty: it can."""
    if op.startswith(("image_", "video_", "audio_")):
        return "works on media, which the texts of a store are not"
    if op in juicer_table().ops or op.endswith(("_filter", "_mapper")):
        return ""
    return "is no filter or mapper: it needs the whole data set, or is not an operator of Data-Juicer"


def _near(op: str) -> str:
    return f"; near: {NEAR[op]}" if op in NEAR else ""


def _length(args: Mapping[str, Any], column: str) -> dict[str, Any] | None:
    if not set(args) <= {"min_len", "max_len"}:
        return None
    limits = {"min": args.get("min_len", _SHORTEST)}
    if "max_len" in args:
        limits["max"] = args["max_len"]
    whole = all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in limits.values())
    in_order = limits["min"] <= limits.get("max", limits["min"]) if whole else False
    return {"type": "length_filter", "unit": "char", "column": column, **limits} if in_order else None


def _removal(pattern: str) -> Callable[[Mapping[str, Any], str], dict[str, Any] | None]:
    def made(args: Mapping[str, Any], column: str) -> dict[str, Any] | None:
        new = args.get("repl", "")
        # A pattern of one's own is Python's and not Rust's, and a backslash in `repl` is a reference to a group.
        if not set(args) <= {"pattern", "repl"} or args.get("pattern") is not None:
            return None
        if not isinstance(new, str) or "\\" in new:
            return None
        rule = {"pattern": pattern, "new": new.replace("$", "$$")}
        return {"type": "replace_pattern", "columns": [column], "rules": [rule]}

    return made


NATIVE: Mapping[str, Callable[[Mapping[str, Any], str], dict[str, Any] | None]] = {
    "text_length_filter": _length,
    "clean_email_mapper": _removal(_EMAIL),
    "clean_ip_mapper": _removal(_IP),
}
"""Operator → the native entry for its arguments and a column; None where these arguments have no exact counterpart."""
