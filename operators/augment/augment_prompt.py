"""augment_prompt: the same task in other words, by rule."""

from __future__ import annotations

import random
import re
from typing import Any, Literal

import polars as pl
from pydantic import Field, field_validator, model_validator

from buffer_engine.identity import stable_seed
from operators.base import ADDED_SCHEMA, Context, Contract, Operator, OperatorConfig, Result

_PLACE = "{prompt}"
_WORD = re.compile(r"[^\W\d_]{4,}")


class AugmentPromptConfig(OperatorConfig):
    """How many copies, and how they differ."""

    copies: int = Field(1, ge=1, le=64, description="most new rows of a dialogue")
    templates: tuple[str, ...] = Field(
        (), description="texts with {prompt} in the place of the old prompt; a copy takes one that no other copy takes"
    )
    typos: float = Field(
        0.0, ge=0, le=1, description="share of words, of four letters at least, in which two letters change places"
    )
    case: Literal["keep", "lower", "upper"] = Field("keep", description="case of the old prompt's letters")

    @field_validator("templates")
    @classmethod
    def _templates_have_a_place(cls, templates: tuple[str, ...]) -> tuple[str, ...]:
        odd = [text for text in templates if text.count(_PLACE) != 1]
        if odd:
            raise ValueError(f"the template {odd[0]!r} does not have {_PLACE} once")
        if len(set(templates)) < len(templates):
            raise ValueError("a template is there twice")
        return templates

    @model_validator(mode="after")
    def _changes_something(self) -> AugmentPromptConfig:
        if not self.templates and not self.typos and self.case == "keep":
            raise ValueError("nothing would change: give templates, typos or case")
        if self.copies > 1 and not self.typos and self.copies > len(self.templates):
            raise ValueError(f"{self.copies} copies need as many templates, or typos, to differ")
        return self


class AugmentPrompt(Operator[AugmentPromptConfig]):
    """Adds to an imported dialogue copies whose last user message is written otherwise; the old row stays.

    First the case changes, then typos are made, then a template is put around. Digits, short words and everything that
    is no letter stay as they are, so that the answer still fits. Chance comes from the pass's seed, the row's id and
    the copy's number alone. A copy that equals the old row or another copy is left out. Copies are text that nobody
    sampled, each a group of its own; `info_json` says `copy` and the `template`. Sampled rows, rows made by operators,
    and dialogues without a user message get none.
    """

    Config = AugmentPromptConfig

    def contract(self) -> Contract:
        """Reads dialogues and their origin; adds rows."""
        return Contract(reads=frozenset(("messages", "made_by", "mean_logprob")), adds=True, cost="python")

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Write the copies."""
        added: list[dict[str, Any]] = []
        unsampled = ((frame["made_by"] == "import") & frame["mean_logprob"].is_null()).fill_null(False)
        # A Python loop over the rows that get copies: every letter of them may change.
        for row in unsampled.arg_true():
            messages: list[dict[str, Any]] = frame["messages"][row].to_list()
            place = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
            if place < 0 or not messages[place]["content"]:
                continue
            written = {messages[place]["content"]}
            name = frame["experience_id"][row]
            for copy, (text, template) in enumerate(self._variants(messages[place]["content"], context.seed, name)):
                if text not in written:
                    written.add(text)
                    new = [*messages[:place], messages[place] | {"content": text}, *messages[place + 1 :]]
                    info = f'{{"copy": {copy}, "template": {"null" if template is None else template}}}'
                    added.append({"parent": row, "messages": new, "bundle": f"{name}/{copy}", "info_json": info})
        schema = {"parent": pl.UInt32(), "messages": frame.schema["messages"]}
        schema |= {name: ADDED_SCHEMA[name] for name in ("bundle", "info_json")}
        return Result(added=pl.DataFrame(added, schema=schema, orient="row"))

    def _variants(self, prompt: str, seed: int, name: str) -> list[tuple[str, int | None]]:
        """Text and number of the template of every copy."""
        config = self.config
        order: list[int | None] = list(range(len(config.templates)))
        random.Random(stable_seed(seed, name, "templates")).shuffle(order)
        order += [None] * (config.copies - len(order)) if len(order) < config.copies else []
        cased = {"keep": prompt, "lower": prompt.lower(), "upper": prompt.upper()}[config.case]
        variants: list[tuple[str, int | None]] = []
        for copy, template in enumerate(order[: config.copies]):
            chance = random.Random(stable_seed(seed, name, copy))
            text = _with_typos(cased, config.typos, chance) if config.typos else cased
            if template is not None:
                text = config.templates[template].replace(_PLACE, text)
            variants.append((text, template))
        return variants


def _with_typos(text: str, share: float, chance: random.Random) -> str:
    def spoil(match: re.Match[str]) -> str:
        word = match[0]
        if chance.random() >= share:
            return word
        at = chance.randrange(1, len(word) - 2)  # the first and the last letter stay
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]

    return _WORD.sub(spoil, text)
