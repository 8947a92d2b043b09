"""What all operators share that mend text: where the mended text goes, and when a stored row is replaced.

Nothing that is stored changes, and text is never encoded anew for rows that a model sampled: a mended column is seen
by later operators of the pass only. Imported text rows, which nobody sampled, may be replaced by rows with mended
messages.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, TypeVar

import polars as pl
from pydantic import Field, model_validator

from operators.base import Context, Contract, Cost, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of

_ROLES: dict[str, tuple[str, ...]] = {"prompt": ("system", "user"), "response": ("assistant",)}


class MendConfig(OperatorConfig):
    """Which columns are mended, and whether stored rows follow."""

    columns: tuple[str, ...] = Field(
        ("prompt", "response"), min_length=1, description="text columns to mend: prompt, response, info keys"
    )
    rewrite: bool = Field(
        False, description="also replace imported text rows by rows with mended messages; sampled rows never change"
    )

    @model_validator(mode="after")
    def _rewrites_messages_only(self) -> MendConfig:
        others = [name for name in self.columns if name not in _ROLES]
        if self.rewrite and others:
            raise ValueError(f"rewrite mends messages: columns are prompt and response, not {others[0]!r}")
        return self


MendConfigT = TypeVar("MendConfigT", bound=MendConfig)


class Mender(Operator[MendConfigT]):
    """Base of operators that mend text: subclasses say how, in `mend`.

    `prompt` means system and user messages when rows are rewritten, `response` assistant messages; tool messages are
    never touched.
    """

    cost: ClassVar[Cost] = "expression"

    @abstractmethod
    def mend(self, texts: pl.Series) -> pl.Series:
        """The mended texts, String, in their order; null stays null. Each text is mended on its own."""

    def contract(self) -> Contract:
        """Reads and writes the configured columns; with `rewrite` also reads messages, drops and adds."""
        rewrite = self.config.rewrite
        extra = ("messages", "made_by", "mean_logprob") if rewrite else ()
        return Contract(
            reads=frozenset((*self.config.columns, *extra)),
            writes={name: pl.String() for name in dict.fromkeys(self.config.columns)},
            drops=rewrite,
            adds=rewrite,
            cost=self.cost,
        )

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Mend the columns and, with `rewrite`, the messages of imported rows."""
        columns = {name: self.mend(frame[name]).alias(name) for name in dict.fromkeys(self.config.columns)}
        return self.rewritten(frame, columns) if self.config.rewrite else Result(columns=columns)

    def rewritten(self, frame: pl.DataFrame, columns: dict[str, pl.Series]) -> Result:
        """`columns`, and a new row in place of every imported one whose messages change."""
        mended = self._messages(frame["messages"])
        unsampled = (pl.col("made_by") == "import") & pl.col("mean_logprob").is_null()
        changed = frame.select(((pl.col("messages") != mended) & unsampled).fill_null(False)).to_series()
        rows = changed.arg_true()
        return Result(
            columns=columns,
            verdicts=verdicts_of(
                changed.alias("changed").to_frame(),
                "reject",
                pl.when("changed").then(pl.lit("replaced")),
                detail=pl.lit(f"text mended by {self.config.type}"),
            ),
            added=pl.DataFrame({"parent": rows.cast(pl.UInt32), "messages": mended.gather(rows)}),
        )

    def _messages(self, messages: pl.Series) -> pl.Series:
        """All messages with the contents of the roles concerned mended."""
        roles = [role for name in self.config.columns for role in _ROLES[name]]
        nested = messages.to_frame("message").with_row_index("row__")
        flat = nested.filter(pl.col("message").list.len() > 0).explode("message")
        content = flat["message"].struct.field("content")
        theirs = flat["message"].struct.field("role").is_in(roles)
        mended = content.zip_with(~theirs, self.mend(content).alias("content"))
        lists = (
            flat.with_columns(pl.col("message").struct.with_fields(mended.alias("content")))
            .group_by("row__", maintain_order=True)
            .agg(pl.col("message").alias("mended"))
        )
        joined = nested.join(lists, on="row__", how="left", maintain_order="left")
        return joined.select(pl.coalesce("mended", "message").alias("messages")).to_series()
