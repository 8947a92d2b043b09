"""Running an operator so that one bad row costs one row.

When `apply` raises on many rows, the rows are halved until the failing ones stand alone; a group operator is halved by
groups, and an operator that needs the whole frame fails as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from buffer_engine.errors import BufferEngineError, OperatorError
from operators.base import Context, Contract, Operator, Result, RowError
from operators.checking import check_result


def apply_guarded(
    operator: Operator[Any], contract: Contract, frame: pl.DataFrame, context: Context, *, name: str
) -> Result:
    """The checked result of `operator` on `frame`; rows (or groups) on which it raises become errors.

    Raises:
        OperatorError: the result breaks the contract, or the operator fails on an empty frame.
    """
    return _Guard(operator, contract, context, name).run(frame)


def describe(error: BaseException) -> str:
    """`TypeName: message`, as kept in the detail of a decision."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@dataclass(frozen=True, slots=True)
class _Guard:
    operator: Operator[Any]
    contract: Contract
    context: Context
    name: str

    def run(self, frame: pl.DataFrame) -> Result:
        try:
            result = self.operator.apply(frame, self.context)
        except BufferEngineError:
            raise
        except Exception as error:  # noqa: BLE001 - the border at which a failing row becomes data
            return self._split(frame, error)
        check_result(self.name, self.contract, frame, result)
        return result

    def _split(self, frame: pl.DataFrame, error: Exception) -> Result:
        if frame.height == 0:
            raise OperatorError(f"operator {self.name!r} fails on an empty frame: {describe(error)}") from error
        units = self._units(frame)
        if len(units) == 1:
            return self._failed(frame, error)
        half = len(units) // 2
        parts = [[row for unit in side for row in unit] for side in (units[:half], units[half:])]
        return merge(self.contract, [(rows, self.run(frame[rows])) for rows in parts])

    def _units(self, frame: pl.DataFrame) -> list[list[int]]:
        if self.contract.scope == "row":
            return [[row] for row in range(frame.height)]
        if self.contract.scope == "frame":
            return [list(range(frame.height))]
        groups = frame.select("group_id", row=pl.int_range(pl.len())).group_by("group_id", maintain_order=True)
        return groups.agg("row")["row"].to_list()

    def _failed(self, frame: pl.DataFrame, error: Exception) -> Result:
        living = frame["alive"].to_list() if self.contract.over == "all" else [True] * frame.height
        message = describe(error)
        return Result(
            columns={
                name: pl.Series(name, [None] * frame.height, dtype) for name, dtype in self.contract.writes.items()
            },
            scores={name: pl.Series(name, [None] * frame.height, pl.Float64) for name in self.contract.scores},
            scored=pl.Series("scored", [False] * frame.height, pl.Boolean),
            errors=[RowError(row, message) for row in range(frame.height) if living[row]],
        )


def merge(contract: Contract, parts: Sequence[tuple[list[int], Result]]) -> Result:
    """One result for the whole frame from the results of its parts.

    Args:
        parts: for every part the rows it was cut from, in its order, and its checked result; together they cover every
            row once.
    """
    order = pl.Series([row for rows, _ in parts for row in rows], dtype=pl.UInt32).arg_sort()
    verdicts: list[pl.DataFrame] = []
    added: list[pl.DataFrame] = []
    for rows, result in parts:
        index = pl.Series(rows, dtype=pl.UInt32)
        if result.verdicts is not None:
            verdicts.append(result.verdicts.with_columns(row=index.gather(result.verdicts["row"])))
        if result.added is not None:
            moved = result.added.with_columns(parent=index.gather(result.added["parent"]))
            added.append(moved_spans(moved, index))
    return Result(
        columns={
            name: pl.concat([result.columns[name] for _, result in parts]).gather(order) for name in contract.writes
        },
        scores={
            name: pl.concat([result.scores[name] for _, result in parts]).gather(order) for name in contract.scores
        },
        scored=pl.concat([_scored(rows, result) for rows, result in parts]).gather(order),
        verdicts=pl.concat(verdicts).sort("row") if verdicts else None,
        added=pl.concat(added, how="diagonal").sort("parent", maintain_order=True) if added else None,
        errors=[RowError(rows[error.row], error.message) for rows, result in parts for error in result.errors],
        comments={rows[row]: text for rows, result in parts for row, text in result.comments.items()},
    )


def moved_spans(added: pl.DataFrame, names: pl.Series) -> pl.DataFrame:
    """`added` with the row of every span replaced by its entry in `names`; the field is called as before."""
    if "spans" not in added.columns:
        return added
    spans = added.select("spans").with_row_index("new__")
    flat = spans.filter(pl.col("spans").list.len() > 0).explode("spans")
    moved = flat.with_columns(
        pl.col("spans").struct.with_fields(names.gather(flat["spans"].struct.field("row")).alias("row"))
    )
    lists = moved.group_by("new__", maintain_order=True).agg("spans")
    return added.with_columns(spans.select("new__").join(lists, on="new__", how="left", maintain_order="left")["spans"])


def _scored(rows: list[int], result: Result) -> pl.Series:
    return result.scored if result.scored is not None else pl.Series("scored", [True] * len(rows), pl.Boolean)
