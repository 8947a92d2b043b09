"""What an operator returned, held against what it promised.

Nothing is mended here: a result that breaks its contract is a mistake in the operator and stops the pass, because
guessing what was meant would lose or invent rows.
"""

from __future__ import annotations

import polars as pl

from buffer_engine.errors import ConservationError, OperatorError
from operators.base import ADDED_SCHEMA, VERDICT_SCHEMA, Contract, Result

_DOORS = {"reject": "drops", "hold": "holds", "mask": "masks"}


def check_result(operator: str, contract: Contract, frame: pl.DataFrame, result: Result) -> None:
    """Check shapes, types and doors of `result` for the rows of `frame`.

    Raises:
        ConservationError: a row is judged twice, does not exist, or was taken out before.
        OperatorError: an undeclared or missing column, score or door; a wrong height or type; a score not finite.
    """
    _check_columns(operator, contract, frame, result)
    _check_scores(operator, contract, frame, result)
    judged = _check_verdicts(operator, contract, frame, result)
    failed = [error.row for error in result.errors]
    _check_rows(operator, frame, [*judged, *failed], what="verdicts and errors")
    _check_added(operator, contract, frame, result)


def _row_name(frame: pl.DataFrame, row: int) -> str:
    return f"row {row} ({frame['experience_id'][row]!r})"


def _check_columns(operator: str, contract: Contract, frame: pl.DataFrame, result: Result) -> None:
    for name, series in result.columns.items():
        if name not in contract.writes:
            declared = ", ".join(contract.writes) or "none"
            raise OperatorError(
                f"operator {operator!r} wrote column {name!r}, which its contract lacks (it has: {declared})"
            )
        _check_series(operator, f"column {name!r}", series, frame.height, contract.writes[name])
    missing = [name for name in contract.writes if name not in result.columns]
    if missing:
        raise OperatorError(f"operator {operator!r} declares column {missing[0]!r} but did not write it")


def _check_series(operator: str, what: str, series: pl.Series, height: int, dtype: pl.DataType) -> None:
    if len(series) != height:
        raise OperatorError(f"operator {operator!r}: {what} has {len(series)} rows, the frame has {height}")
    if series.dtype != dtype:
        raise OperatorError(f"operator {operator!r}: {what} is {series.dtype}, its contract says {dtype}")


def _check_scores(operator: str, contract: Contract, frame: pl.DataFrame, result: Result) -> None:
    undeclared = [name for name in result.scores if name not in contract.scores]
    if undeclared:
        raise OperatorError(f"operator {operator!r} wrote score {undeclared[0]!r}, which its contract lacks")
    missing = [name for name in contract.scores if name not in result.scores]
    if missing:
        raise OperatorError(f"operator {operator!r} declares score {missing[0]!r} but did not write it")
    if result.scored is not None:
        _check_series(operator, "`scored`", result.scored, frame.height, pl.Boolean())
        if result.scored.null_count():
            raise OperatorError(f"operator {operator!r}: `scored` has nulls; say true or false for every row")
    for name, series in result.scores.items():
        _check_series(operator, f"score {name!r}", series, frame.height, pl.Float64())
        bad = (series.is_not_null() & ~series.is_finite()).fill_null(False)
        if result.scored is not None:
            bad = bad & result.scored
        if bad.any():
            row = bad.arg_true()[0]
            raise OperatorError(
                f"operator {operator!r}: score {name!r} of {_row_name(frame, row)} is {series[row]}; "
                "a score is a finite number, or null where the row cannot be scored"
            )


def _check_verdicts(operator: str, contract: Contract, frame: pl.DataFrame, result: Result) -> list[int]:
    if result.verdicts is None:
        return []
    if dict(result.verdicts.schema) != VERDICT_SCHEMA:
        raise OperatorError(
            f"operator {operator!r}: verdicts have the columns {dict(result.verdicts.schema)}, "
            f"expected {VERDICT_SCHEMA}"
        )
    rows: list[int] = result.verdicts["row"].to_list()
    if result.verdicts["row"].null_count():
        raise ConservationError(f"operator {operator!r}: a verdict names no row")
    for verdict in result.verdicts["verdict"].unique().to_list():
        if verdict not in _DOORS:
            raise OperatorError(f"operator {operator!r} gave the verdict {verdict!r}; it may be {', '.join(_DOORS)}")
        if not getattr(contract, _DOORS[verdict]):
            raise OperatorError(
                f"operator {operator!r} gave the verdict {verdict!r}, but its contract does not declare "
                f"`{_DOORS[verdict]}`"
            )
    unsaid = result.verdicts.filter(pl.col("reason").is_null() | (pl.col("reason") == ""))
    if unsaid.height:
        raise OperatorError(f"operator {operator!r}: the verdict on row {unsaid['row'][0]} has no reason")
    return rows


def _check_rows(operator: str, frame: pl.DataFrame, rows: list[int], *, what: str) -> None:
    beyond = [row for row in rows if not 0 <= row < frame.height]
    if beyond:
        raise ConservationError(
            f"operator {operator!r}: {what} name row {beyond[0]}, but the frame has {frame.height} rows"
        )
    if len(set(rows)) != len(rows):
        twice = next(row for row in rows if rows.count(row) > 1)
        raise ConservationError(
            f"operator {operator!r}: {what} have {len(rows)} entries for {len(set(rows))} rows; "
            f"{_row_name(frame, twice)} leaves through {rows.count(twice)} doors"
        )
    if "alive" in frame.columns:
        alive = frame["alive"]
        gone = [row for row in rows if not alive[row]]
        if gone:
            raise ConservationError(
                f"operator {operator!r}: {what} name {_row_name(frame, gone[0])}, which an earlier operator took out; "
                "judge only rows whose `alive` is true"
            )


def _check_added(operator: str, contract: Contract, frame: pl.DataFrame, result: Result) -> None:
    if result.added is None:
        return
    if not contract.adds:
        raise OperatorError(f"operator {operator!r} added rows, but its contract does not declare `adds`")
    found = dict(result.added.schema)
    if result.added.columns[:2] != ["parent", "messages"] or not set(result.added.columns[2:]) <= set(ADDED_SCHEMA):
        known = ", ".join(ADDED_SCHEMA)
        raise OperatorError(
            f"operator {operator!r}: added rows have the columns {result.added.columns}; "
            f"they may have parent, messages and then {known}"
        )
    for name in result.added.columns[2:]:
        if found[name] != ADDED_SCHEMA[name]:
            raise OperatorError(
                f"operator {operator!r}: column {name!r} of added rows is {found[name]}, not {ADDED_SCHEMA[name]}"
            )
    parents: list[int | None] = result.added["parent"].to_list()
    beyond = [row for row in parents if row is None or not 0 <= row < frame.height]
    if beyond:
        raise ConservationError(
            f"operator {operator!r}: an added row has parent {beyond[0]}, but the frame has {frame.height} rows"
        )
    if "spans" in result.added.columns:
        rows = result.added["spans"].drop_nulls().explode().drop_nulls().struct.field("row")
        odd = rows.filter(rows.is_null() | (rows >= frame.height))
        if len(odd):
            raise ConservationError(
                f"operator {operator!r}: a span is of row {odd[0]}, but the frame has {frame.height} rows"
            )
