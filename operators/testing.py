"""The contract of operators as a check that anyone can run on their own operator.

`check_operator(MyOperator, config, frame)` calls the operator in every way that must not change its answer: twice, on
fewer columns, on shuffled rows, row by row or group by group, and once with the whole pass around it, which counts the
rows. What differs is named in a sentence. `hostile_frame` has the rows that break operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from buffer_engine.errors import OperatorError
from operators.base import Context, Contract, Operator, OperatorConfig, Result, operator_type
from operators.checking import check_result
from operators.engine import run_operators
from operators.frame import ALWAYS, FRAME_COLUMNS, info_dtype
from operators.plan import compile_operators
from operators.registry import OPERATORS

CONTEXT = Context(seed=7, model_version=5, step=3)
"""The moment in which operators are checked."""

_Outcome = dict[str, tuple[Any, ...]]


def sample_frame(columns: Mapping[str, pl.DataType] | None = None) -> pl.DataFrame:
    """Eight rows in three groups with every frame column; among them empty text, Unicode, nulls and an unscored row.

    Args:
        columns: task info keys and components to add, with their types; some values are null.
    """
    replies = ["4", "", "The answer is 4", "４ ", "é\u200bé", "I don't know\r\n", "4", "#### 12"]
    rows: list[dict[str, Any]] = []
    for place, reply in enumerate(replies):
        sampled = place % 4
        rows.append(
            {
                "experience_id": f"x{place}", "task_id": f"t{place // 3}", "group_id": f"g{place // 3}",
                "group_size": 3, "sample_index": place % 3, "attempt": 0, "turn_index": 0, "partition": "train",
                "model_version": None if place == 4 else place % 6,
                "made_by": "import" if place % 2 else "explorer", "stop_reason": "length" if place == 5 else "eos",
                "eos_sampled": place != 5, "truncated": place == 5, "error": None,
                "messages": [_message("user", f"2+{place}?"), _message("assistant", reply)],
                "prompt": f"2+{place}?", "response": reply, "turns": 1, "token_count": sampled,
                "total_tokens": 0 if place % 2 else 2 + sampled, "prompt_length": 0 if place % 2 else 2,
                "token_ids": list(range(2 + sampled)), "loss_mask": [False, False] + [True] * sampled,
                "logprobs": [None, None] + [-0.5] * sampled, "mean_logprob": -0.5 if sampled else None,
                "info_json": "{}", "task_info": '{"dataset": "chain_sum", "answer": "4", "metadata": {}}',
                "reward": None if place == 2 else float(place % 2), "alive": True,
            }
        )  # fmt: skip
    frame = pl.DataFrame(rows, schema={name: column.dtype for name, column in FRAME_COLUMNS.items()})
    for name, dtype in (columns or {}).items():
        frame = frame.with_columns(_values(info_dtype(dtype), frame.height).alias(name))
    return frame


_HOSTILE = (
    "", " \n\t ", "\0\x1b[0m\u202e\ufeff", "e\u0301\u200d👩‍👩‍👧 ٣٤ ４ ﷽",
    "```json\n{\"a\": [1, 2\n```", "<b>**[x](y)</b> `z",
    "((((((((((", "\\ $1 \\1 %s {} {0} ''; DROP TABLE rows; --", "NaN inf -0 1e999 null None", "a " * 40_000,
    "".join(chr(point) for point in range(0x100, 0xD7FF, 97)),
)  # fmt: skip


def hostile_frame(columns: Mapping[str, pl.DataType] | None = None) -> pl.DataFrame:
    """Rows that break operators: empty and blank text, control and combining characters, half-open markup, 80,000
    characters in one text, empty dialogues and token lists, and null in every column that may be null.

    Args:
        columns: as for `sample_frame`; every other value is null.
    """
    height = len(_HOSTILE)
    frame = pl.concat([sample_frame()[:1]] * height).with_columns(
        pl.Series("experience_id", [f"x{row}" for row in range(height)]),
        pl.Series("group_id", [f"g{row // 4}" for row in range(height)]),
        pl.Series("sample_index", [row % 4 for row in range(height)], pl.Int32),
        pl.Series("prompt", _HOSTILE[::-1]),
        pl.Series("response", _HOSTILE),
        pl.Series("messages", [
            [] if row % 3 == 0 else [_message("user", None), _message("assistant", text)] * (1 + row % 3)
            for row, text in enumerate(_HOSTILE)
        ], FRAME_COLUMNS["messages"].dtype),
        pl.Series("reward", [None if row % 2 else 1e308 * (-1) ** (row // 2) for row in range(height)], pl.Float64),
        *(pl.when(pl.int_range(pl.len()) % 2 == 0).then(pl.lit(None)).otherwise(pl.col(name)).alias(name)
          for name in ("model_version", "logprobs", "mean_logprob", "eos_sampled")),
        *(pl.lit([], dtype=FRAME_COLUMNS[name].dtype).alias(name) for name in ("token_ids", "loss_mask")),
        token_count=pl.lit(0, pl.Int64), total_tokens=pl.lit(0, pl.Int64), prompt_length=pl.lit(0, pl.Int32),
    ).select(list(FRAME_COLUMNS))  # fmt: skip
    for name, dtype in (columns or {}).items():
        values = _values(info_dtype(dtype), height)
        odd = pl.Series([row % 2 == 0 for row in range(height)])
        frame = frame.with_columns(values.set(odd, None).alias(name))
    return frame


def check_operator(
    operator_class: type[Operator[Any]],
    config: OperatorConfig,
    frame: pl.DataFrame | None = None,
    *,
    context: Context = CONTEXT,
) -> None:
    """Check that a configured operator keeps its contract.

    Args:
        frame: rows to try it on, with all columns it reads; default: `sample_frame`, in which columns that are neither
            frame columns nor there become text.
    Raises:
        AssertionError: a promise is broken; the message says which, and on which row.
    """
    if frame is None:
        unknown = operator_class(config).contract().reads - set(FRAME_COLUMNS)
        frame = sample_frame({name: pl.String() for name in sorted(unknown)})
    _Suite(operator_class, config, frame, context).run()


class _Suite:
    def __init__(
        self, operator_class: type[Operator[Any]], config: OperatorConfig, frame: pl.DataFrame, context: Context
    ) -> None:
        self._class = operator_class
        self._config = config
        self._context = context
        self._operator = operator_class(config)
        self._contract: Contract = self._operator.contract()
        absent = sorted(self._contract.reads - set(frame.columns))
        _require(not absent, f"{self._name}: the frame lacks the columns {absent} that it reads")
        self._full = frame
        self._frame = frame.select(list(dict.fromkeys((*ALWAYS, *sorted(self._contract.reads)))))

    @property
    def _name(self) -> str:
        return f"operator {self._config.name!r}"

    def run(self) -> None:
        try:
            expected = self._outcome(self._frame)
            self._check_purity(expected)
            self._compare(self._outcome(self._full), expected, "sees columns beside those it reads")
            self._compare(self._outcome(self._frame.reverse()), expected, "sees the rows in another order")
            shuffled = self._frame.sample(fraction=1.0, shuffle=True, seed=3)
            self._compare(self._outcome(shuffled), expected, "sees the rows in another order")
            self._check_empty()
            self._check_splits(expected)
            self._check_living()
            self._check_conservation()
        finally:
            self._operator.close()

    def _apply(self, operator: Operator[Any], frame: pl.DataFrame) -> Result:
        result = operator.apply(frame, self._context)
        try:
            check_result(self._config.name, self._contract, frame, result)
        except OperatorError as error:
            raise AssertionError(f"{self._name} breaks its contract: {error}") from error
        return result

    def _outcome(self, frame: pl.DataFrame) -> _Outcome:
        return _by_row(frame, self._apply(self._operator, frame))

    def _check_purity(self, expected: _Outcome) -> None:
        before = self._frame.clone()
        self._compare(self._outcome(self._frame), expected, "runs a second time")
        _require(self._frame.equals(before), f"{self._name} changed the frame it was given")
        other = self._class(self._config)
        try:
            self._compare(_by_row(self._frame, self._apply(other, self._frame)), expected, "is built anew")
        finally:
            other.close()
        again = self._class(self._config).contract()
        _require(again == self._contract, f"{self._name} gives another contract when asked again")

    def _check_empty(self) -> None:
        result = self._apply(self._operator, self._frame.clear())
        found = 0 if result.verdicts is None else result.verdicts.height
        _require(found == 0 and not result.errors, f"{self._name} judges rows of an empty frame")

    def _check_splits(self, expected: _Outcome) -> None:
        if self._contract.scope == "frame":
            return
        by = "experience_id" if self._contract.scope == "row" else "group_id"
        parts = self._frame.partition_by(by, maintain_order=True)
        found: _Outcome = {}
        for part in parts:
            found |= self._outcome(part)
        unit = "row by row" if self._contract.scope == "row" else "group by group"
        self._compare(found, expected, f"runs {unit}")

    def _check_living(self) -> None:
        """Rows that earlier operators took out are seen with `over: all` and never judged."""
        if self._contract.over == "all" and self._frame.height:
            dead = pl.int_range(pl.len()) % 3 == 1
            self._apply(
                self._operator,
                self._full.with_columns(alive=~dead).select(list(dict.fromkeys((*self._frame.columns, "alive")))),
            )

    def _check_conservation(self) -> None:
        """In a whole pass every row leaves through one door, and a second pass gives the same verdicts."""
        kind = operator_type(self._operator)
        if kind not in OPERATORS.names() or self._frame.is_empty():
            return
        info = {name: dtype for name, dtype in self._full.schema.items() if name not in FRAME_COLUMNS}
        plan = compile_operators([self._config], available=info, has_reward=True)
        frame = self._full.with_columns(error=pl.lit(None, pl.String))
        first, second = (
            run_operators(plan, frame, seed=7, step=3, model_version=5, pass_id="p", run_id="r", history=self._history)
            for _ in range(2)
        )
        columns = ["experience_id", "verdict", "reason"]
        _require(
            first.decisions.select(columns).equals(second.decisions.select(columns)),
            f"{self._name} gives other verdicts when a pass is repeated",
        )

    def _history(self, columns: Sequence[str]) -> pl.DataFrame:
        return self._context.history(columns)

    def _compare(self, found: _Outcome, expected: _Outcome, when: str) -> None:
        for experience_id, wanted in expected.items():
            got = found[experience_id]
            _require(
                got == wanted, f"{self._name} judges {experience_id!r} as {got} instead of {wanted} when it {when}"
            )


def _require(kept: bool, message: str) -> None:
    """An assertion that `python -O` does not remove."""
    if not kept:
        raise AssertionError(message)


def _by_row(frame: pl.DataFrame, result: Result) -> _Outcome:
    """Everything that a result says about each experience."""
    verdicts = {} if result.verdicts is None else {row[0]: row[1:] for row in result.verdicts.rows()}
    errors = {error.row: error.message for error in result.errors}
    added: dict[int, list[Any]] = {}
    if result.added is not None:
        ids = frame["experience_id"].to_list()
        for new in result.added.to_dicts():
            # Rows are named by their place, which is another in every order.
            spans = [span | {"row": ids[span["row"]]} for span in new.pop("spans", None) or ()]
            added.setdefault(new.pop("parent"), []).append((new, spans))
    return {
        experience_id: (
            verdicts.get(row),
            errors.get(row),
            added.get(row),
            {name: series[row] for name, series in result.scores.items()},
            True if result.scored is None else result.scored[row],
            {name: _plain(series[row]) for name, series in result.columns.items()},
            result.comments.get(row),
        )
        for row, experience_id in enumerate(frame["experience_id"].to_list())
    }


def _plain(value: Any) -> Any:
    return value.to_list() if isinstance(value, pl.Series) else value


def _message(role: str, content: str | None) -> dict[str, Any]:
    return {"role": role, "content": content, "tool_calls": None, "tool_call_id": None, "media": []}


def _values(dtype: pl.DataType, height: int) -> pl.Series:
    values: Sequence[Any]
    if dtype == pl.String:
        values = ["4", None, "12", ""]
    elif dtype == pl.Boolean:
        values = [True, None, False]
    else:
        values = [1, 0, None, 2]
    return pl.Series([values[row % len(values)] for row in range(height)], dtype=dtype)
