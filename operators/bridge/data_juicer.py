"""data_juicer: an operator of Data-Juicer by its name, in a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from pydantic import Field, model_validator

from buffer_engine.errors import OperatorError, did_you_mean
from operators.base import Context, Contract, Operator, Result, RowError, ScoreOperatorConfig
from operators.bridge.juicer_calls import Failure, JuicerCalls, Outcome
from operators.bridge.juicer_table import MANAGED_ARGS, Effect, JuicerOp, juicer_table
from operators.frame import MESSAGES
from operators.mending import MendConfig, Mender
from operators.verdicts import verdicts_of

_ROLES = {"prompt": ("system", "user"), "response": ("assistant",)}
"""Whose messages a column stands for when rows are rewritten, as in `operators.mending`."""


class DataJuicerConfig(ScoreOperatorConfig):
    """Which operator, with which arguments, on which texts, and where it runs."""

    weight: float = Field(0.0, description="share of the statistic in the reward, for a filter that computes just one")
    op: str = Field(description="name of the operator in Data-Juicer, e.g. words_num_filter")
    args: Mapping[str, Any] = Field({}, description="its arguments, as in a recipe of Data-Juicer")
    column: str = Field("response", description="text column that it sees as `text`")
    fields: Mapping[str, str] = Field({}, description="further fields that a filter sees: field → column")
    rewrite: bool = Field(
        False, description="a mapper also replaces imported text rows by rows with changed messages, never sampled rows"
    )
    python: Path | None = Field(
        None, description="interpreter in whose environment Data-Juicer is installed; default: the one that runs this"
    )
    release: str = Field(
        juicer_table().release, description="release of Data-Juicer that must be there; part of the fingerprint"
    )
    effect: Effect | None = Field(
        None, description="filter | map, for an operator that is not in the table of those known to run offline"
    )
    stats: tuple[str, ...] = Field((), description="numbers that such a filter computes, to be stored as scores")
    network: bool = Field(False, description="let it reach models and services; packages are never installed")
    batch_rows: int = Field(256, ge=1, description="most rows in one call")
    timeout_seconds: float = Field(60.0, gt=0, description="longest time for one call; then its process is ended")
    most_lost: int = Field(
        10, ge=1, description="calls of a pass that may hang or end their process before the pass is given up"
    )

    @model_validator(mode="after")
    def _fits_the_operator(self) -> DataJuicerConfig:
        known = juicer_table().ops.get(self.op)
        managed = [name for name in self.args if name in MANAGED_ARGS]
        if managed:
            raise ValueError(f"{managed[0]!r} is about Data-Juicer's own executor, which is not used: leave it out")
        if known is None and self.effect is None:
            raise ValueError(
                f"{self.op!r} is not known to run offline ({did_you_mean(self.op, juicer_table().ops)}); "
                "to use it all the same say effect: filter (with its stats) or effect: map"
            )
        if known is not None:
            self._fits_the_table(known)
        self._fits_its_effect()
        return self

    def _fits_the_table(self, known: JuicerOp) -> None:
        strange = [name for name in self.args if name not in known.arguments]
        if strange:
            hint = did_you_mean(strange[0], known.arguments) if known.arguments else "it takes none"
            raise ValueError(f"{self.op} has no argument {strange[0]!r} ({hint})")
        if self.effect not in (None, known.effect):
            raise ValueError(f"{self.op} is a {known.effect}: leave `effect` out")
        if self.stats:
            listed = ", ".join(known.stats) or "none"
            raise ValueError(f"the statistics of {self.op} are known ({listed}): leave `stats` out")

    def _fits_its_effect(self) -> None:
        entry = self.entry
        if entry.effect == "map" and (self.fields or self.stats or self.weight):
            raise ValueError(f"{self.op} is a map: it has no fields, stats or weight")
        if entry.effect == "filter" and self.rewrite:
            raise ValueError(f"{self.op} is a filter: it changes no text that could be rewritten")
        if self.weight and len(entry.stats) != 1:
            raise ValueError(f"weight is for a filter with one statistic; {self.op} has {len(entry.stats)}")
        if "fields" in entry.reads and "text" not in entry.reads and not self.fields:
            raise ValueError(f"{self.op} reads a field: name it and its column in `fields`")
        if "text" in self.fields:
            raise ValueError("the field `text` is what `column` says")
        if self.rewrite and self.column not in ("prompt", "response"):
            raise ValueError(f"rewrite changes messages: column is prompt or response, not {self.column!r}")
        try:
            json.dumps(dict(self.args))
        except (TypeError, ValueError) as error:
            raise ValueError(f"args are plain YAML values ({error})") from error

    @property
    def entry(self) -> JuicerOp:
        """What is known about the operator: from the table, or as the configuration says."""
        found = juicer_table().ops.get(self.op)
        if found is not None:
            return found
        assert self.effect is not None  # the validator asked for it
        return JuicerOp(effect=self.effect, reads=("text",), stats=self.stats)

    @property
    def components(self) -> Mapping[str, str]:
        """Statistic → component: the id for the only one, else id_statistic."""
        stats = self.entry.stats
        return {stat: self.name if len(stats) == 1 else f"{self.name}_{stat}" for stat in stats}


class DataJuicer(Operator[DataJuicerConfig]):
    """Runs a filter or mapper of Data-Juicer, out of process, without its executor.

    A filter rejects with the name of its operator as reason; its statistics are scores without weight, of rejected rows
    too. A mapper changes `column` for the operators after it; what is stored stays, and with `rewrite: true` imported
    text rows are replaced (`replaced`), as by `normalize_text`. Null text is not shown to Data-Juicer: a filter rejects
    it (`null`), a mapper leaves it. A row on which the operator raises, hangs or ends its process is an error of that
    row (`on_error`): the batch is repeated row by row. Packages are never installed and, unless `network` says so,
    nothing is fetched; an operator that wants to stops the pass with the line that helps. Operators of one interpreter
    share a process, which takes seconds to start; operators that need the whole data set (deduplicators, selectors)
    are not run: this package has its own.
    """

    Config = DataJuicerConfig

    def __init__(self, config: DataJuicerConfig) -> None:
        super().__init__(config)
        self._calls: JuicerCalls | None = None

    def contract(self) -> Contract:
        """A filter reads its fields, scores its statistics and rejects; a mapper replaces the column."""
        config, entry = self.config, self.config.entry
        text = (config.column,) if "text" in entry.reads else ()
        if entry.effect == "filter":
            reads = frozenset((*text, *config.fields.values()))
            return Contract(reads=reads, scores=tuple(config.components.values()), drops=True, cost="python")
        extra = ("messages", "made_by", "mean_logprob") if config.rewrite else ()
        return Contract(
            reads=frozenset((*text, *extra)),
            writes={config.column: pl.String()},
            drops=config.rewrite,
            adds=config.rewrite,
            cost="python",
        )

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Filter or change every row."""
        column = self.config.column
        if "text" in self.config.entry.reads and not (
            frame[column].dtype == pl.String or frame[column].dtype == pl.Null
        ):
            raise OperatorError(f"operator {self.config.name!r} works on text; {column!r} is {frame[column].dtype}")
        return self._filtered(frame) if self.config.entry.effect == "filter" else self._mapped(frame)

    def files(self) -> tuple[Path, ...]:
        """The interpreter, where one is named, so that a wrong path shows before anything runs."""
        return () if self.config.python is None else (self.config.python,)

    def close(self) -> None:
        """End the process."""
        if self._calls is not None:
            self._calls.close()
            self._calls = None

    def _filtered(self, frame: pl.DataFrame) -> Result:
        config, reads_text = self.config, "text" in self.config.entry.reads
        fields = {"text": config.column} if reads_text else {}
        fields |= dict(config.fields)
        seen = frame.select(pl.col(column).alias(field) for field, column in fields.items())
        rows = seen["text"].is_not_null().arg_true().to_list() if reads_text else list(range(frame.height))
        outcomes: list[Outcome | None] = [None] * frame.height
        for row, outcome in zip(rows, self._outcomes(seen[rows]), strict=True):
            outcomes[row] = outcome
        errors = [RowError(row, each.message) for row, each in enumerate(outcomes) if isinstance(each, Failure)]
        good: list[Mapping[str, Any]] = [each if isinstance(each, Mapping) else {} for each in outcomes]
        scores = {
            component: pl.Series(component, [each.get(f"stat:{stat}") for each in good], pl.Float64)
            for stat, component in config.components.items()
        }
        told = pl.DataFrame(
            {
                "reason": [self._reason(outcome) for outcome in outcomes],
                "detail": [self._detail(each) if each else None for each in good],
            },
            schema={"reason": pl.String, "detail": pl.String},
        )
        return Result(
            scores=scores,
            verdicts=verdicts_of(told, "reject", pl.col("reason"), detail=pl.col("detail")),
            errors=errors,
        )

    def _reason(self, outcome: Outcome | None) -> str | None:
        if outcome is None:
            return "null"
        return None if isinstance(outcome, Failure) or outcome["keep"] else self.config.op

    def _detail(self, outcome: Mapping[str, Any]) -> str:
        numbers = [f"{name[5:]} {value:g}" for name, value in outcome.items() if name != "keep" and value is not None]
        limits = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in self.config.args.items()]
        return "; ".join((", ".join(numbers) or "no statistic", ", ".join(limits) or "default arguments"))

    def _mapped(self, frame: pl.DataFrame) -> Result:
        texts = frame[self.config.column].cast(pl.String)
        seen: dict[str, Outcome] = {}
        columns, errors = self._changed(texts, seen)
        if not self.config.rewrite:
            return Result(columns={self.config.column: columns}, errors=errors)
        unsampled = ((pl.col("made_by") == "import") & pl.col("mean_logprob").is_null()).fill_null(False)
        # Dialogues that a model sampled are never rewritten, so their messages need not be asked about.
        asked = frame.with_columns(messages=pl.when(unsampled).then("messages").otherwise(pl.lit([], MESSAGES)))
        changed = _Rewriter(self, seen).rewritten(asked, {self.config.column: columns})
        return self._rewritten(asked, changed, errors, seen)

    def _changed(self, texts: pl.Series, seen: dict[str, Outcome]) -> tuple[pl.Series, list[RowError]]:
        """The changed texts (as they were where the operator fails) and the failures; `seen` learns every text."""
        new = [text for text in texts.drop_nulls().unique(maintain_order=True).to_list() if text not in seen]
        seen.update(zip(new, self._outcomes(pl.DataFrame({"text": new}, schema={"text": pl.String})), strict=True))
        values: list[str | None] = []
        errors: list[RowError] = []
        # A Python loop: the results come from Python, text by text.
        for row, text in enumerate(texts.to_list()):
            outcome = None if text is None else seen[text]
            if isinstance(outcome, Failure):
                errors.append(RowError(row, outcome.message))
            values.append(outcome["text"] if isinstance(outcome, Mapping) else text)
        return pl.Series(texts.name, values, pl.String), errors

    def _rewritten(
        self, frame: pl.DataFrame, changed: Result, errors: Sequence[RowError], seen: Mapping[str, Outcome]
    ) -> Result:
        """`changed` without the rows of which some message failed: those are errors."""
        assert changed.verdicts is not None  # `rewritten` gives both
        assert changed.added is not None
        failures = {error.row: error.message for error in errors}
        if any(isinstance(outcome, Failure) for outcome in seen.values()):
            for row, messages in enumerate(frame["messages"].to_list()):
                theirs = [part["content"] for part in messages if part["role"] in _ROLES[self.config.column]]
                failed = [seen.get(text) for text in theirs if text is not None]
                for outcome in failed:
                    if isinstance(outcome, Failure):
                        failures.setdefault(row, outcome.message)
        gone = list(failures)
        return Result(
            columns=changed.columns,
            verdicts=changed.verdicts.filter(~pl.col("row").is_in(gone)),
            added=changed.added.filter(~pl.col("parent").is_in(gone)),
            errors=[RowError(row, failures[row]) for row in sorted(failures)],
        )

    def _outcomes(self, rows: pl.DataFrame) -> list[Outcome]:
        if rows.height == 0:
            return []
        if self._calls is None:
            config = self.config
            self._calls = JuicerCalls(
                config.name,
                config.op,
                args=config.args,
                effect=config.entry.effect,
                stats=config.entry.stats,
                python=sys.executable if config.python is None else str(config.python),
                release=config.release,
                network=config.network,
                batch_rows=config.batch_rows,
                seconds=config.timeout_seconds,
                most_lost=config.most_lost,
            )
        return self._calls.run(rows.to_arrow())


class _Rewriter(Mender[MendConfig]):
    """How menders replace imported rows, with Data-Juicer's answers."""

    Config = MendConfig

    def __init__(self, owner: DataJuicer, seen: dict[str, Outcome]) -> None:
        columns = [owner.config.column]
        kind = f"data_juicer {owner.config.op}"  # stands in the detail of the decisions
        super().__init__(MendConfig.model_validate({"type": kind, "columns": columns, "rewrite": True}))
        self._owner, self._seen = owner, seen

    def mend(self, texts: pl.Series) -> pl.Series:
        """The changed texts; a text on which the operator fails stays."""
        return self._owner._changed(texts, self._seen)[0]  # pyright: ignore[reportPrivateUsage] - one operator in two classes
