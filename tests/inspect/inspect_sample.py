"""One small run, written by hand: every expected number in these tests is worked out from this file.

Tasks t1, t2, t3 train; h1 is held out. Rows (group, task, weights that sampled them):

    a0 a1  g1 t1 v0   answered 2 (right) and 3 (wrong); trained in batch-1
    b0 b1  g2 t2 v0   both answered 4 (right); b1 repeats b0 and was rejected; b0 trained in batch-2
    c0 c1  g3 t3 v1   c0 failed; c1 was cut off, its answer could not be scored, and batch-3 holds it
    d0     g4 t1 v1   answered 2 (right); held for people; its sibling is missing
    e0     ge h1 v0   held out, answered 10 (right)

Components: answer (weight 1), style (weight 0.5), parsable (weight 0), ended (no weight: a metric).
a0's style was 0.5 when the row was trained and became 1.0 by a person's later score.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from buffer_engine.schema import BATCH_STATE, ROLLOUT_STATE, TABLES

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def at(minutes: int) -> datetime:
    return START + timedelta(minutes=minutes)


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content, "tool_calls": None, "tool_call_id": None, "media": []}


PROMPTS = {"t1": "1+1=", "t2": "2+2=", "t3": "3+3=", "h1": "5+5="}

TASK_ROWS = [
    {
        "task_id": task_id,
        "taskset": "heldout" if task_id == "h1" else "sums",
        "partition": "eval" if task_id == "h1" else "train",
        "messages": [message("system", "Answer."), message("user", prompt)],
        "prompt_hash": f"hash-{task_id}",
        "info_json": '{"gold": "2"}',
        "created_at": at(0),
    }
    for task_id, prompt in PROMPTS.items()
]


def rollout(
    experience_id: str,
    group_id: str,
    task_id: str,
    version: int,
    reply: str | None,
    sampled: list[tuple[int, float]],
    **other: Any,
) -> dict[str, Any]:
    replies = [] if reply is None else [message("assistant", reply)]
    return {
        "experience_id": experience_id,
        "parent_id": None,
        "made_by": "explorer",
        "run_id": "r1",
        "task_id": task_id,
        "group_id": group_id,
        "group_size": 1 if group_id == "ge" else 2,
        "attempt": 0,
        "sample_index": int(experience_id[-1]),
        "turn_index": 0,
        "partition": "eval" if task_id == "h1" else "train",
        "explore_step": version + 1,
        "model_version": version,
        "token_versions": [{"version": version, "length": len(sampled)}],
        "messages": [message("system", "Answer."), message("user", PROMPTS[task_id]), *replies],
        "token_ids": [1, 2] + [token for token, _ in sampled],
        "loss_mask": [False, False] + [True] * len(sampled),
        "logprobs": [None, None] + [logprob for _, logprob in sampled],
        "logprob_kind": "raw",
        "prompt_length": 2,
        "stop_reason": "eos",
        "eos_sampled": True,
        "truncated": False,
        "error": None,
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 4, "seed": 7},
        "tokenizer_id": "tok",
        "template_hash": "tpl",
        "info_json": "{}",
        "created_at": at(1 + version),
        **other,
    }


ROLLOUT_ROWS = [
    rollout("a0", "g1", "t1", 0, "2", [(10, -0.25), (3, -0.5)]),
    rollout("a1", "g1", "t1", 0, "3", [(11, -2.5), (3, -0.125)]),
    rollout("b0", "g2", "t2", 0, "4", [(12, -0.5), (3, -0.125)]),
    rollout("b1", "g2", "t2", 0, "4", [(12, -0.5), (3, -0.125)]),
    rollout("c0", "g3", "t3", 1, None, [], stop_reason="timeout", eos_sampled=False, error="timeout: 5 s"),
    rollout(
        "c1", "g3", "t3", 1, "six", [(13, -1.0), (14, -1.0), (15, -4.0), (16, -1.0)],
        stop_reason="length", eos_sampled=False, truncated=True,
    ),
    rollout("d0", "g4", "t1", 1, "2", [(10, -0.25), (3, -0.25)]),
    rollout("e0", "ge", "h1", 0, "10", [(17, -0.125), (18, -0.25), (3, -0.125)]),
]  # fmt: skip


def score(
    experience_id: str, name: str, value: float | None, *, version: int = 1, source: str = "operator"
) -> dict[str, Any]:
    return {
        "experience_id": experience_id,
        "name": name,
        "value": value,
        "weight": {"answer": 1.0, "style": 0.5, "parsable": 0.0, "ended": None}[name],
        "source": source,
        "author": "ann" if source == "human" else name,
        "version": version,
        "run_id": "r1",
        "scored_at": at(3 if version == 1 else 9),
        "comment": None,
    }


SCORE_ROWS = [
    score("a0", "answer", 1.0), score("a0", "style", 0.5), score("a0", "parsable", 1.0), score("a0", "ended", 1.0),
    score("a1", "answer", 0.0), score("a1", "style", 1.0), score("a1", "parsable", 0.0), score("a1", "ended", 0.0),
    score("b0", "answer", 1.0), score("b0", "style", 0.0), score("b0", "parsable", 1.0),
    score("b1", "answer", 1.0), score("b1", "style", 0.0), score("b1", "parsable", 1.0),
    score("c0", "answer", 1.0),
    score("c1", "answer", None), score("c1", "style", 1.0),
    score("d0", "answer", 1.0), score("d0", "style", 1.0),
    score("e0", "answer", 1.0), score("e0", "style", 0.0),
    score("a0", "style", 1.0, version=2, source="human"),
]  # fmt: skip


def decision(
    experience_id: str, verdict: str, operator: str, position: int | None, reason: str, pass_id: str, **other: Any
) -> dict[str, Any]:
    return {
        "experience_id": experience_id,
        "verdict": verdict,
        "operator": operator,
        "position": position,
        "reason": reason,
        "detail": None,
        "ref_id": None,
        "pass_id": pass_id,
        "run_id": "r1",
        "decided_at": at(4),
        **other,
    }


DECISION_ROWS = [
    decision("b1", "reject", "exact_dedup", 0, "duplicate", "p1", ref_id="b0", detail="same response"),
    decision("a0", "keep", "pipeline", None, "passed", "p1"),
    decision("a1", "keep", "pipeline", None, "passed", "p1"),
    decision("b0", "keep", "pipeline", None, "passed", "p1"),
    decision("c0", "reject", "intake", -1, "error:timeout", "p2", detail="timeout: 5 s"),
    decision("d0", "hold", "people", 2, "label", "p2"),
    decision("c1", "keep", "pipeline", None, "passed", "p2"),
    decision("e0", "keep", "pipeline", None, "evaluation", "eval"),
]


def operator_run(pass_id: str, position: int, operator: str, **counts: int) -> dict[str, Any]:
    names = ("rows_in", "kept", "rejected", "held", "masked", "added", "scored", "nulls", "errors")
    return {
        "run_id": "r1",
        "pass_id": pass_id,
        "position": position,
        "operator": operator,
        "type": operator,
        "fingerprint": f"print-{operator}",
        **{name: counts.get(name, 0) for name in names},
        "cpu_seconds": 0.25,
        "wall_seconds": 0.5,
        "created_at": at(4),
    }


OPERATOR_ROWS = [
    operator_run("p1", -1, "intake", rows_in=4, kept=4),
    operator_run("p1", 0, "exact_dedup", rows_in=4, kept=3, rejected=1),
    operator_run("p1", 1, "answer", rows_in=3, kept=3, scored=3),
    operator_run("p1", 2, "people", rows_in=3, kept=3),
    operator_run("p2", -1, "intake", rows_in=3, kept=2, rejected=1),
    operator_run("p2", 0, "exact_dedup", rows_in=2, kept=2),
    operator_run("p2", 1, "answer", rows_in=2, kept=2, scored=1, nulls=1, errors=1),
    operator_run("p2", 2, "people", rows_in=2, kept=1, held=1),
]


def batch(number: int, rows: int, tokens: int) -> dict[str, Any]:
    return {
        "batch_id": f"batch-{number}",
        "run_id": "r1",
        "step": number,
        "model_version": number - 1,
        "algorithm": "grpo",
        "rows": rows,
        "trained_tokens": tokens,
        "config_hash": "conf",
        "code_commit": "commit",
        "reader_json": '{"type": "fifo"}',
        "rng_json": '{"seed": 7}',
        "created_at": at(5 + number),
    }


def batch_row(number: int, position: int, experience_id: str, group: str, reward: float, advantage: float) -> dict:
    return {
        "batch_id": f"batch-{number}",
        "position": position,
        "experience_id": experience_id,
        "group_id": group,
        "reward": reward,
        "advantage": advantage,
        "weight": 1.0,
        "kind": "rollout",
        "score_versions_json": '{"answer": 1, "style": 1}',
    }


def model(version: int) -> dict[str, Any]:
    return {
        "run_id": "r1",
        "version": version,
        "parent": None if version == 0 else version - 1,
        "step": version,
        "path": None,
        "config_hash": "conf",
        "code_commit": "commit",
        "created_at": at(5 + version),
    }


def metric(step: int, name: str, value: float | None, minutes: int = 8) -> dict[str, Any]:
    return {"run_id": "r1", "step": step, "name": name, "value": value, "recorded_at": at(minutes)}


METRIC_ROWS = [
    metric(0, "eval/heldout/solve_rate", 0.25),
    metric(0, "eval/heldout/ended", 0.5),
    metric(0, "eval/heldout/parsable", 0.5),
    metric(0, "eval/heldout/right_when_parsable", 0.5),
    metric(1, "explore/reward_mean", 0.875),
    metric(1, "explore/reward_std", 0.25),
    metric(1, "explore/tokens", 300.0),
    metric(1, "explore/seconds", 1.0),
    metric(2, "explore/tokens", 100.0),
    metric(2, "explore/seconds", 3.0),
    metric(1, "train/trained_tokens", 30.0),
    metric(1, "train/seconds", 2.0),
    metric(1, "train/tokens_per_second", 50.0),
    metric(2, "train/trained_tokens", 10.0),
    metric(2, "train/seconds", 8.0),
    metric(2, "train/tokens_per_second", 10.0),
    metric(1, "train/loss", 0.5),
    metric(1, "train/grad_norm", None),
    metric(2, "explore/reward_mean", 1.5),
    metric(2, "eval/heldout/solve_rate", 0.5),
    metric(2, "eval/heldout/ended", 1.0),
    metric(2, "eval/heldout/parsable", 1.0),
    metric(2, "eval/heldout/right_when_parsable", 0.75),
    metric(2, "eval/heldout/solve_rate", 0.75),
]
"""Sampled: 400 tokens in 4 s, 300 and 33 by step; trained: 40 in 10 s; computed: 50·2 + 10·8 = 180 in 10 s.

The solve rate of step 2 was recorded twice in the same moment: the later record counts."""

EVENT_ROWS = [
    {
        "run_id": "r1",
        "step": 2,
        "kind": "retry",
        "count": 1,
        "experience_id": "c0",
        "detail": None,
        "recorded_at": at(2),
    }
]


def state(
    experience_id: str,
    sequence: int,
    status: str,
    uses: int = 0,
    reserved_by: str | None = None,
    trained_step: int | None = None,
) -> dict[str, Any]:
    return {
        "experience_id": experience_id,
        "sequence": sequence,
        "status": status,
        "uses": uses,
        "reserved_by": reserved_by,
        "trained_step": trained_step,
    }


STATE_ROWS = [
    state("a0", 0, "kept", 1, None, 1),
    state("a1", 1, "kept", 1, None, 1),
    state("b0", 2, "kept", 1, None, 2),
    state("b1", 3, "rejected"),
    state("c0", 4, "rejected"),
    state("c1", 5, "kept", 0, "batch-3"),
    state("d0", 6, "held"),
    state("e0", 7, "kept"),
]


def batch_state(number: int, status: str, rows: int, *, reserved: int, committed: int | None) -> dict[str, Any]:
    return {
        "batch_id": f"batch-{number}",
        "run_id": "r1",
        "status": status,
        "step": number if committed is not None else None,
        "rows": rows,
        "reserved_at": at(reserved),
        "committed_at": None if committed is None else at(committed),
    }


BATCH_STATE_ROWS = [
    batch_state(1, "committed", 2, reserved=5, committed=6),
    batch_state(2, "committed", 1, reserved=6, committed=7),
    batch_state(3, "reserved", 1, reserved=8, committed=None),
]

TOKEN_STATS_ROWS = [
    {
        "batch_id": "batch-1",
        "experience_id": experience_id,
        "run_id": "r1",
        "step": 1,
        "trained": [False, False, True, True],
        "old_logprobs": [None, None, *old],
        "ratios": [None, None, *ratios],
        "entropies": [None, None, *entropies],
        "advantages": [None, None, advantage, advantage],
        "recorded_at": at(6),
    }
    for experience_id, old, ratios, entropies, advantage in (
        ("a0", [-0.5, -0.5], [0.5, 1.0], [1.0, 0.5], 0.5),
        ("a1", [-2.5, -0.125], [1.0, 1.5], [2.0, 0.5], -0.5),
    )
]
"""What step 1 saw: of four tokens two left 0.8 … 1.2; ratios 4.0 and entropies 4.0 in all."""

ROWS: dict[str, list[dict[str, Any]]] = {
    "tasks": TASK_ROWS,
    "rollouts": ROLLOUT_ROWS,
    "scores": SCORE_ROWS,
    "decisions": DECISION_ROWS,
    "operator_runs": OPERATOR_ROWS,
    "batches": [batch(1, 2, 4), batch(2, 1, 2)],
    "batch_rows": [
        batch_row(1, 0, "a0", "g1", 1.25, 0.5),
        batch_row(1, 1, "a1", "g1", 0.5, -0.5),
        batch_row(2, 0, "b0", "g2", 1.0, 0.25),
    ],
    "models": [model(0), model(1), model(2)],
    "metrics": METRIC_ROWS,
    "events": EVENT_ROWS,
}


def sample_tables(**replaced: list[dict[str, Any]]) -> dict[str, pa.Table]:
    """The run's tables with their bookkeeping; `replaced` gives other rows for a table."""
    rows = {**ROWS, "rollout_state": STATE_ROWS, "batch_state": BATCH_STATE_ROWS, **replaced}
    schemas = {name: spec.schema for name, spec in TABLES.items()}
    schemas |= {"rollout_state": ROLLOUT_STATE, "batch_state": BATCH_STATE}
    return {name: pa.Table.from_pylist(found, schema=schemas[name]) for name, found in rows.items()}
