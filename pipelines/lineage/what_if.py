"""What a batch would have been with other scores, weights or without an operator; nothing is trained or written.

Everything starts from what was known when the manifest was written: the scores it used and the verdicts before it. With
no change asked for, the rewards and advantages found here are therefore those of the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import pyarrow.compute as pc

from buffer_engine.errors import UsageError, did_you_mean
from buffer_engine.store.base import ExperienceStore
from operators.reward_state import current_reward
from pipelines.curate import polars_frame
from pipelines.lineage.changes import Changes, changed_scores
from pipelines.lineage.finding import StoredBatch, specification_of, version_of_manifest
from pipelines.retention import refuse_erased
from pipelines.spec import Spec
from trainers.advantages import compute_advantages
from trainers.algorithms.base import Algorithm
from trainers.registry import ALGORITHMS

FINAL = ("keep", "reject", "hold", "release")


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A batch beside what it would have been.

    Attributes:
        rows: one line per row of either: experience_id, group_id, change (stays | enters | leaves | stays out: it would
            enter if it had a reward), reward_before, reward_after, advantage_before, advantage_after, tokens_before,
            tokens_after (trained tokens), reason (why it enters or leaves); null where it is not part of that batch.
        summary: (what, before, after).
        notes: what this answer does not cover.
    """

    batch_id: str
    run_id: str
    rows: pl.DataFrame
    summary: Sequence[tuple[str, float | None, float | None]]
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Known:
    """What the manifest knew: the rows of its groups with their facts, the scores, and the verdicts."""

    facts: pl.DataFrame
    scores: pl.DataFrame
    decisions: pl.DataFrame
    notes: list[str] = field(default_factory=list[str])


def what_if(store: ExperienceStore, found: StoredBatch, changes: Changes) -> WhatIf:
    """Compare a batch with what the changes would have made of it.

    Rows of the batch's groups that only the left-out operator rejected enter. A row whose reward is null under the
    changes leaves when the algorithm needs rewards. Advantages are computed anew over the rows of each group.

    Raises:
        UsageError: a change names an operator, component or version that the batch's rows do not have; the run has no
            trainer, or its specification is gone.
    """
    algorithm = _algorithm(specification_of(store.path, found))
    known = _known(store, found)
    if changes.without is not None:
        _check_operator(store, found, known, changes.without)
    manifest = _manifest_frame(found)
    entering = _entering(known, manifest, changes.without)
    members = pl.concat([manifest.select("experience_id"), entering.select("experience_id")])
    facts = members.join(known.facts, on="experience_id", how="left", maintain_order="left")
    scores = changed_scores(store, found, known.scores, members["experience_id"].to_list(), changes)
    rewards = current_reward(scores.to_arrow()).select("experience_id", reward_after="reward")
    frame = (
        facts.join(rewards, on="experience_id", how="left", maintain_order="left")
        .with_columns(pl.when(pl.col("error").is_null()).then("reward_after").alias("reward_after"))
        .join(manifest.drop("group_id"), on="experience_id", how="left", maintain_order="left")
        .join(entering.select("experience_id", "reason"), on="experience_id", how="left", maintain_order="left")
        .with_columns(
            before=pl.col("position").is_not_null(),
            masked_after=pl.col("experience_id").is_in(_masked(known.decisions, changes.without)),
        )
    )
    without_reward = pl.col("reward_after").is_null() & pl.lit(algorithm.needs.reward)
    frame = frame.with_columns(after=~without_reward)
    frame = _with_advantages(frame, algorithm)
    return WhatIf(
        found.batch_id,
        found.run_id,
        _rows(frame),
        _summary(frame, algorithm),
        [*known.notes, *_notes(store, found, algorithm, changes, entering)],
    )


def _algorithm(spec: Spec) -> Algorithm[Any]:
    trainer: Any = spec.trainer
    if trainer is None:
        raise UsageError("the run has no trainer, so its batches have no advantages to compare")
    return ALGORITHMS.load(trainer.algorithm.type)(trainer.algorithm)


def _known(store: ExperienceStore, found: StoredBatch) -> _Known:
    version = version_of_manifest(store, found.batch_id)
    groups = set(found.rows.column("group_id").to_pylist())
    columns = ["experience_id", "group_id", "run_id", "partition"]
    rollouts = store.table("rollouts", until=version, columns=columns)
    of_run = pc.and_(pc.equal(rollouts.column("run_id"), found.run_id), pc.equal(rollouts.column("partition"), "train"))
    rollouts = polars_frame(rollouts.filter(of_run)).filter(pl.col("group_id").is_in(sorted(groups)))
    ids = rollouts["experience_id"].to_list()
    refuse_erased(store, ids, doing=f"what-if for batch {found.batch_id}")
    facts = polars_frame(store.fetch(ids, columns=["experience_id", "group_id", "error", "loss_mask"])).select(
        "experience_id", "group_id", "error", tokens=pl.col("loss_mask").list.sum().cast(pl.Int64)
    )
    decisions = store.table("decisions", until=version)
    decisions = polars_frame(decisions.filter(pc.is_in(decisions.column("experience_id"), value_set=_text(ids))))
    scores = polars_frame(store.narrow("scores", ids))
    before = store.table("scores", until=version, columns=["experience_id", "name", "version"])
    then = polars_frame(before.filter(pc.is_in(before.column("experience_id"), value_set=_text(ids))))
    scores = scores.join(then.with_columns(then=pl.lit(True)), on=["experience_id", "name", "version"], how="left")
    return _Known(facts, _used_then(scores, found), decisions)


def _used_then(scores: pl.DataFrame, found: StoredBatch) -> pl.DataFrame:
    """The scores with `used`: the version that counted for the manifest (its own word where it has one)."""
    said = [
        (row, name, version)
        for row, text in zip(
            found.rows.column("experience_id").to_pylist(),
            found.rows.column("score_versions_json").to_pylist(),
            strict=True,
        )
        for name, version in json.loads(text).items()
    ]
    words = pl.DataFrame(said, schema={"experience_id": pl.String, "name": pl.String, "said": pl.Int32}, orient="row")
    key = ["experience_id", "name"]
    newest = scores.filter(pl.col("then").fill_null(False)).group_by(key).agg(newest=pl.col("version").max())
    return (
        scores.join(words, on=key, how="left")
        .join(newest, on=key, how="left")
        .with_columns(used=(pl.col("version") == pl.coalesce("said", "newest")).fill_null(False))
        .drop("said", "newest", "then")
    )


def _manifest_frame(found: StoredBatch) -> pl.DataFrame:
    return polars_frame(found.rows).select(
        "experience_id", "position", "group_id",
        reward_before="reward", advantage_before="advantage", masked_before=pl.col("masked").fill_null(False),
    )  # fmt: skip


def _entering(known: _Known, manifest: pl.DataFrame, without: str | None) -> pl.DataFrame:
    """Rows of the groups that are not in the manifest and whose last verdict before it was the operator's reject."""
    last = (
        known.decisions.filter(pl.col("verdict").is_in(FINAL))
        .group_by("experience_id", maintain_order=True)
        .last()
        .filter((pl.col("verdict") == "reject") & (pl.col("operator") == (without or "")))
    )
    order = known.facts.join(manifest, on="experience_id", how="anti", maintain_order="left")
    return order.join(last, on="experience_id", how="inner", maintain_order="left").select(
        "experience_id", "group_id", reason=pl.format("rejected by {}: {}", "operator", "reason")
    )


def _masked(decisions: pl.DataFrame, without: str | None) -> list[str]:
    # What the reader notes as masked are single tokens, not the row.
    masks = decisions.filter((pl.col("verdict") == "mask") & ~pl.col("operator").is_in([without or "reader", "reader"]))
    return masks["experience_id"].unique().to_list()


def _with_advantages(frame: pl.DataFrame, algorithm: Algorithm[Any]) -> pl.DataFrame:
    """Adds `advantage_after`, computed over the rows of the batch as it would have been."""
    if not algorithm.needs.advantages:
        return frame.with_columns(advantage_after=pl.lit(None, pl.Float64))
    after = frame.filter("after")
    values = compute_advantages(algorithm.config.advantage, _shaped(after, "reward_after")).advantages
    found = after.select("experience_id").with_columns(advantage_after=values)
    return frame.join(found, on="experience_id", how="left", maintain_order="left")


def _shaped(rows: pl.DataFrame, reward: str) -> pl.DataFrame:
    return rows.select("experience_id", "group_id", "error", reward=pl.col(reward))


def _rows(frame: pl.DataFrame) -> pl.DataFrame:
    change = pl.when("before", "after").then(pl.lit("stays")).when("before").then(pl.lit("leaves"))
    reason = pl.when(pl.col("after")).then("reason").otherwise(pl.lit("no reward"))
    return frame.sort(pl.col("position").fill_null(2**31 - 1), maintain_order=True).select(
        "experience_id",
        "group_id",
        change.when("after").then(pl.lit("enters")).otherwise(pl.lit("stays out")).alias("change"),
        "reward_before",
        pl.when("after").then("reward_after").alias("reward_after"),
        "advantage_before",
        "advantage_after",
        pl.when("before").then(_trained("masked_before")).alias("tokens_before"),
        pl.when("after").then(_trained("masked_after")).alias("tokens_after"),
        reason.alias("reason"),
    )


def _trained(masked: str) -> pl.Expr:
    return pl.when(pl.col(masked).fill_null(False)).then(0).otherwise(pl.col("tokens"))


def _summary(frame: pl.DataFrame, algorithm: Algorithm[Any]) -> list[tuple[str, float | None, float | None]]:
    before, after = frame.filter("before"), frame.filter("after")
    lines: list[tuple[str, float | None, float | None]] = [
        ("rows", before.height, after.height),
        ("groups", before["group_id"].n_unique(), after["group_id"].n_unique()),
        (
            "trained tokens",
            _number(before.select(_trained("masked_before").sum()).item()),
            _number(after.select(_trained("masked_after").sum()).item()),
        ),
        ("mean reward", _number(before["reward_before"].mean()), _number(after["reward_after"].mean())),
    ]
    if algorithm.needs.advantages:
        names = {"singleton": "rows alone in their group", "zero_variance": "rows in groups without a difference"}
        counts = [
            compute_advantages(algorithm.config.advantage, _shaped(rows, reward)).counts
            for rows, reward in ((before, "reward_before"), (after, "reward_after"))
        ]
        lines += [(said, counts[0][name], counts[1][name]) for name, said in names.items()]
        sizes = [_number(rows[name].abs().mean()) for rows, name in
                 ((before, "advantage_before"), (after, "advantage_after"))]  # fmt: skip
        lines.append(("mean size of the advantage", sizes[0], sizes[1]))
        both = frame.filter(pl.col("before") & pl.col("after"))
        moved = (both["advantage_after"] - both["advantage_before"]).abs() > 1e-9
        turned = both["advantage_after"] * both["advantage_before"] < 0
        lines.append(("rows whose advantage changes", None, int(moved.sum())))
        lines.append(("rows whose advantage changes its sign", None, int(turned.sum())))
    return lines


def _number(value: Any) -> float | None:
    return None if value is None else value


def _check_operator(store: ExperienceStore, found: StoredBatch, known: _Known, name: str) -> None:
    runs = store.table("operator_runs", columns=["run_id", "operator"])
    ids = set(runs.filter(pc.equal(runs.column("run_id"), found.run_id)).column("operator").to_pylist())
    ids |= set(known.decisions["operator"].unique().to_list()) | set(known.scores["name"].unique().to_list())
    ids -= {"pipeline", "intake"}
    if name not in ids:
        raise UsageError(f"--without {name!r}: the run has no such operator: {did_you_mean(name, ids)}")


def _notes(
    store: ExperienceStore, found: StoredBatch, algorithm: Algorithm[Any], changes: Changes, entering: pl.DataFrame
) -> list[str]:
    notes: list[str] = []
    if algorithm.needs.reward_penalty:
        notes.append(
            "in training a KL penalty was taken off the rewards before the advantages; it needs the model, so the "
            "advantages after are those without it"
        )
    if changes.without is None:
        return notes
    if entering.height:
        notes.append(f"operators after {changes.without} have not judged the rows that enter; they might reject some")
    whole = _rejected_elsewhere(store, found, changes.without)
    if whole:
        rows, groups = whole
        notes.append(
            f"{changes.without} also rejected whole groups in the passes that this batch came from: {groups}, with "
            f"{rows} rows; without it they would have waited for a batch of their own"
        )
    return notes


def _rejected_elsewhere(store: ExperienceStore, found: StoredBatch, name: str) -> tuple[int, int] | None:
    """Rows and groups that the operator took out whole in the passes that the batch's rows went through."""
    ids = found.rows.column("experience_id").to_pylist()
    own = polars_frame(store.narrow("decisions", ids)).filter(pl.col("verdict") == "keep")
    decisions = polars_frame(store.table("decisions"))
    rejects = decisions.filter(
        pl.col("pass_id").is_in(own["pass_id"].unique().to_list()),
        pl.col("verdict") == "reject",
        pl.col("operator") == name,
    )
    if not rejects.height:
        return None
    rollouts = polars_frame(store.table("rollouts", columns=["experience_id", "run_id", "group_id"]))
    sizes = rollouts.group_by("run_id", "group_id").agg(size=pl.len())
    groups = (
        rejects.join(rollouts.drop("run_id"), on="experience_id")
        .group_by("run_id", "group_id")
        .agg(gone=pl.col("experience_id").n_unique())
        .join(sizes, on=["run_id", "group_id"])
        .filter(pl.col("gone") == pl.col("size"))
    )
    return (int(groups["gone"].sum()), groups.height) if groups.height else None


def _text(ids: Sequence[str]) -> Any:
    import pyarrow as pa

    return pa.array(ids, pa.string())
