"""What a training batch asks for: order, limits, and what becomes of groups that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from buffer_engine.config import ComponentConfig

PolicyType = Literal["fifo", "newest", "uniform", "prioritized", "stratified", "mixture"]

_USED_BY: Mapping[str, tuple[PolicyType, ...]] = {
    "by": ("prioritized", "stratified"),
    "favor": ("prioritized",),
    "exponent": ("prioritized",),
    "floor": ("prioritized",),
    "unseen": ("prioritized",),
    "importance": ("prioritized",),
    "order": ("stratified", "mixture"),
    "expert_share": ("mixture",),
}
"""Fields that mean something to some policies only."""


class ReadPolicy(ComponentConfig):
    """Which rows a training batch takes next.

    Groups are taken whole; `type` says in which order. A group is ready when every one of its `group_size` rows has a
    final verdict (kept or rejected; a held row makes it wait) and at least one row is kept; only kept rows are taken.
    A batch ends before the first group that does not fit.
    """

    type: PolicyType = Field(
        "fifo",
        description="fifo and newest: by arrival; uniform: any ready group alike; prioritized: by `by`; "
        "stratified: equal shares of tasks or task sets; mixture: rollouts and expert rows at a ratio",
    )
    rows: int = Field(64, gt=0, description="most rows in a batch; a group that would exceed it waits for the next one")
    min_rows: int = Field(1, gt=0, description="fewest rows worth a step; below it nothing is reserved")
    max_staleness: int | None = Field(
        None, ge=0, description="oldest token version may lag this many versions; null: unbounded"
    )
    max_uses: int = Field(1, gt=0, description="committed batches a row may be trained in")
    incomplete: Literal["wait", "drop", "use"] = Field(
        "wait", description="a group with missing siblings: wait for them, reject its rows, or use what is there"
    )
    over_age: Literal["reject", "mask"] = Field(
        "reject",
        description="a group beyond max_staleness: reject it, or train only the tokens that are young enough",
    )
    cooldown_steps: int = Field(
        0, ge=0, description="optimizer steps between two uses of a row; needs max_uses above 1"
    )
    max_tokens: int | None = Field(None, gt=0, description="most tokens in a batch, prompts included; null: unbounded")
    balance: Literal["length"] | None = Field(
        None, description="length: order rows long, short, long, short, so that equal parts of a batch weigh alike"
    )
    samples_per_insert: float | None = Field(
        None, gt=0, description="rows trained per row kept may not exceed this; null: unlimited"
    )
    min_size: int = Field(1, gt=0, description="kept rows before the first batch; needs samples_per_insert")
    seed: int | None = Field(None, ge=0, description="seed of random draws; null: the seed of the run")
    by: str | None = Field(
        None,
        description="prioritized: reward, advantage, staleness or score:NAME; stratified: task or taskset",
    )
    favor: Literal["high", "low"] = Field("high", description="prioritized: which end of `by` is drawn more often")
    exponent: float = Field(0.6, ge=0, le=8, description="prioritized: 0 draws uniformly, 1 in proportion")
    floor: float = Field(0.01, gt=0, description="prioritized, favor high: added to every priority")
    unseen: float = Field(1.0, ge=0, description="prioritized: stands in for a value that a row has not got yet")
    importance: float = Field(0.4, ge=0, le=1, description="prioritized: exponent of the weights that undo the bias")
    order: Literal["fifo", "newest", "uniform"] = Field("fifo", description="stratified, mixture: order inside a part")
    expert_share: float | None = Field(None, gt=0, lt=1, description="mixture: share of imported rows in a batch")

    @model_validator(mode="after")
    def _fits_type(self) -> Self:
        """Fields that `type` does not use must be left alone; those that it needs must be there.

        Raises:
            PydanticCustomError: of type `misfit`; `field` and `fix` in its context say where and what to write.
        """
        for name, types in _USED_BY.items():
            if self.type not in types and getattr(self, name) != type(self).model_fields[name].default:
                fix = f"remove it, or write type: {' or '.join(types)}"
                raise _misfit(name, f"`{name}` means nothing to type {self.type}", fix)
        if self.type == "prioritized" and not is_priority(self.by):
            said = f"type prioritized needs a number of each row to go by, and `by` is {_said(self.by)}"
            raise _misfit("by", said, "write by: reward, advantage, staleness or score:NAME")
        if self.type == "stratified" and self.by not in ("task", "taskset"):
            said = f"type stratified shares a batch between parts, and `by` is {_said(self.by)}"
            raise _misfit("by", said, "write by: task or taskset")
        if self.type == "mixture" and self.expert_share is None:
            raise _misfit("expert_share", "type mixture needs a ratio", "write expert_share, say 0.25")
        if self.expert_share is not None and not 0 < self.expert_rows < self.rows:
            said = f"{self.expert_share:g} of {self.rows} rows are {self.expert_rows} expert rows, which is no mixture"
            raise _misfit("expert_share", said, "write a larger `rows` or another share")
        if self.over_age == "mask" and self.max_staleness is None:
            said = "over_age: mask has to know which tokens are over-age, and max_staleness is null"
            raise _misfit("over_age", said, "write max_staleness")
        if self.cooldown_steps and self.max_uses == 1:
            said = f"a row rests {self.cooldown_steps} steps between two uses, and is used once"
            raise _misfit("cooldown_steps", said, "write max_uses above 1, or remove it")
        if self.min_size > 1 and self.samples_per_insert is None:
            said = f"min_size is {self.min_size}, and nothing limits the rate"
            raise _misfit("min_size", said, "write samples_per_insert, or remove it")
        return self

    @property
    def expert_rows(self) -> int:
        """Places of a batch for expert rows, halves rounded up; 0 unless this is a mixture."""
        return 0 if self.expert_share is None else int(self.rows * self.expert_share + 0.5)

    def seeded(self, seed: int) -> ReadPolicy:
        """This policy with `seed` where it has none of its own."""
        return self if self.seed is not None else self.model_copy(update={"seed": seed})


def is_priority(by: str | None) -> bool:
    """Whether `by` names a number that rows can be prioritized by."""
    return by in ("reward", "advantage", "staleness") or (by is not None and by.startswith("score:") and len(by) > 6)


def _misfit(field: str, said: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError("misfit", "{said}: {fix}", {"field": field, "said": said, "fix": fix})


def _said(value: str | None) -> str:
    return "missing" if value is None else repr(value)
