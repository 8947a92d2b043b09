"""Rows that operators add, as rollouts: tokens cut out of stored rows as they were sampled, or new text encoded.

An operator never gives tokens. It gives messages, which are encoded and train as text that nobody sampled, or spans of
the rows it was shown, whose ids, log-probs and weight versions are taken over unchanged.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import polars as pl
import pyarrow as pa

from buffer_engine.errors import OperatorError
from buffer_engine.identity import experience_id, group_id
from buffer_engine.schema import ROLLOUTS, SCORES
from explorers.base import Engine, Message
from operators.replies import stretches
from operators.reward_state import current_scores
from pipelines.clock import now

_Row = dict[str, Any]
_SHARED = ("tokenizer_id", "template_hash", "logprob_kind", "sampling")
"""What all sources of a row made from spans must agree on, sampling aside: that of the last one is kept."""


def added_rollouts(
    parents: pa.Table, added: pl.DataFrame, *, run_id: str, number: int, engine: Engine | None
) -> pa.Table:
    """Rollouts for the rows that operators made in one pass.

    Args:
        parents: rollouts of the pass: all columns, all rows that `added` refers to.
        added: `CurationResult.added`.
        number: of the pass; part of the new ids.
        engine: encodes new text; None: text rows have no tokens.
    Raises:
        OperatorError: spans reach beyond their row, or mix rows that do not belong together.
    """
    if not added.height:
        return ROLLOUTS.schema.empty_table()
    by_id: dict[str, _Row] = {row["experience_id"]: row for row in parents.to_pylist()}
    rows: list[_Row] = []
    news = added.to_dicts()
    samples: dict[tuple[str, str], set[int]] = {}
    places = [_place(new, samples) for new in news]
    # A loop over rows: each needs its own tokens, which dominates.
    for index, (new, (sample, turn)) in enumerate(zip(news, places, strict=True)):
        parent, bundle = by_id[new["parent_id"]], new.get("bundle")
        label = parent["experience_id"] if bundle is None else f"{bundle}\0"
        group = group_id(run_id, f"{label}/{new['made_by']}", number)
        messages = [_message(message) for message in new["messages"]]
        rows.append(
            {
                **parent,
                "experience_id": experience_id(run_id, parent["task_id"], group, 0, index, turn),
                "parent_id": parent["experience_id"],
                "made_by": new["made_by"],
                "group_id": group,
                "group_size": 1 if bundle is None else new.get("group_size") or len(samples[new["made_by"], bundle]),
                "attempt": 0,
                "sample_index": sample,
                "turn_index": turn,
                "messages": [message.as_dict() for message in messages],
                **(_encoded(new, messages, engine) if new.get("spans") is None else _cut(new, by_id)),
                "info_json": json.dumps(
                    {"pass": number} | json.loads(new.get("info_json") or "{}"), ensure_ascii=False
                ),
                "created_at": now(),
            }
        )
    return pa.Table.from_pylist(rows, schema=ROLLOUTS.schema)


def carried_scores(
    added: pl.DataFrame, rows: pa.Table, scores: pa.Table, *, components: Sequence[str], run_id: str
) -> pa.Table:
    """Scores of parents for the new rows that are made of their sampled tokens: what held of these tokens still does.

    Args:
        added, rows: `CurationResult.added` and the rollouts made of it, in the same order.
        scores: score rows of the parents.
        components: what the operators of the pass write themselves, and will write again; not carried.
    """
    if not added.height or "spans" not in added.columns:
        return SCORES.schema.empty_table()
    heirs = added.select("parent_id", kept=pl.col("spans").is_not_null()).with_columns(
        pl.Series("heir", rows.column("experience_id").to_pylist())
    )
    found = pl.DataFrame(pl.from_arrow(scores)).filter(~pl.col("name").is_in(list(components)))
    latest = found.join(
        current_scores(found).select("experience_id", "name", "version"), on=["experience_id", "name", "version"]
    )
    carried = heirs.filter("kept").join(latest, left_on="parent_id", right_on="experience_id", maintain_order="left")
    made = carried.select(
        experience_id="heir", name="name", value="value", weight="weight", source="source", author="author",
        version=pl.lit(1, pl.Int32), run_id=pl.lit(run_id), scored_at=pl.lit(now()),
        comment=pl.format("carried over from {}", "parent_id"),
    )  # fmt: skip
    return made.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(SCORES.schema)


def _place(new: _Row, samples: dict[tuple[str, str], set[int]]) -> tuple[int, int]:
    """Sample and turn of a new row; without a number of its own, a row is the next sample of its bundle."""
    if new.get("bundle") is None:
        return 0, new.get("turn_index") or 0
    known = samples.setdefault((new["made_by"], new["bundle"]), set())
    given = new.get("sample_index")
    sample = max(known, default=-1) + 1 if given is None else given
    known.add(sample)
    return sample, new.get("turn_index") or 0


def _message(found: Mapping[str, Any]) -> Message:
    return Message(
        role=found["role"],
        content=found["content"] or "",
        tool_calls=found.get("tool_calls"),
        tool_call_id=found.get("tool_call_id"),
        media=tuple(found.get("media") or ()),
    )


def _encoded(new: _Row, messages: Sequence[Message], engine: Engine | None) -> _Row:
    """Tokens of a text that nobody sampled; replies that are context only do not train."""
    if engine is not None:
        token_ids, mask = engine.encode_dialogue(messages)
        tokenizer, template = engine.tokenizer_id, engine.template_hash
    else:
        token_ids, mask, tokenizer, template = (), (), None, None
    trained = list(mask)
    for start, stop in stretches(trained)[: new.get("context_replies") or 0]:
        trained[start:stop] = [False] * (stop - start)
    return {
        "token_ids": list(token_ids),
        "loss_mask": trained,
        "logprobs": None,
        "logprob_kind": None,
        "model_version": None,
        "token_versions": [],
        "sampling": None,
        "prompt_length": trained.index(True) if True in trained else len(trained),
        "tokenizer_id": tokenizer,
        "template_hash": template,
    }


def _cut(new: _Row, by_id: Mapping[str, _Row]) -> _Row:
    """Tokens put together from spans of stored rows."""
    made_by, spans = new["made_by"], new["spans"]
    sources = [by_id[span["experience_id"]] for span in spans]
    for name in _SHARED[:3]:
        values = {source[name] for source in sources}
        if len(values) != 1:
            raise OperatorError(f"operator {made_by!r} joins rows whose {name} differ: {sorted(map(str, values))}")
    if len({source["logprobs"] is None for source in sources}) != 1:
        raise OperatorError(f"operator {made_by!r} joins sampled rows with rows that nobody sampled")
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float | None] = []
    versions: list[int] = []
    for span, source in zip(spans, sources, strict=True):
        start, stop, length = span["start"], span["stop"], len(source["token_ids"])
        if not 0 <= start <= stop <= length:
            name = source["experience_id"]
            raise OperatorError(
                f"operator {made_by!r} cuts [{start}, {stop}) out of row {name!r}, which has {length} tokens"
            )
        token_ids += source["token_ids"][start:stop]
        mask += [trained and span["trained"] for trained in source["loss_mask"][start:stop]]
        if source["logprobs"] is not None:
            logprobs += source["logprobs"][start:stop]
            versions += _versions(source, start, stop)
    last, end = sources[-1], spans[-1]["stop"]
    # How an inner turn ended is not recorded: such a row is known to have been stopped, no more.
    whole = end == len(last["token_ids"])
    ending = {} if whole else {"stop_reason": "stop", "eos_sampled": False, "truncated": False}
    return {
        "token_ids": token_ids,
        "loss_mask": mask,
        "logprobs": None if last["logprobs"] is None else logprobs,
        "token_versions": [{"version": version, "length": len(list(run))} for version, run in groupby(versions)],
        "model_version": min(versions, default=last["model_version"]),
        "prompt_length": mask.index(True) if True in mask else len(mask),
        **{name: last[name] for name in (*_SHARED, "stop_reason", "eos_sampled", "truncated")},
        **ending,
    }


def _versions(source: _Row, start: int, stop: int) -> list[int]:
    """The weight version of every sampled token of a span; empty when the row records none."""
    runs: list[_Row] = source["token_versions"]
    if not runs:
        return []
    every = [run["version"] for run in runs for _ in range(run["length"])]
    sampled = Counter(value is not None for value in source["logprobs"][:start])[True]
    inside = Counter(value is not None for value in source["logprobs"][start:stop])[True]
    return every[sampled : sampled + inside]
