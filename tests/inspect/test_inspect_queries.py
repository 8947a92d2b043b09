"""Every named query over the run of `inspect_sample`, with rows worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from inspect_sample import (
    ROLLOUT_ROWS,
    SCORE_ROWS,
    STATE_ROWS,
    rollout,
    sample_tables,
    score,
    state,
)

from buffer_engine.inspect import Inspection, QueryError, connect, named_queries
from buffer_engine.inspect.library import parse_sql

ANSWERS: dict[str, list[tuple[Any, ...]]] = {
    "dead_groups": [("r1", "g2", 0, 2, 1.0, "all solved", "trained", "t2")],
    "why_rejected": [
        ("r1", "exact_dedup", "duplicate", 1, 0.5, "b1", "same response"),
        ("r1", "intake", "error:timeout", 1, 0.5, "c0", "timeout: 5 s"),
    ],
    # train v0: a0 1.5, a1 0.5, b0 1, b1 1, three of four solved; v1: only d0 has a reward.
    "solve_rate_by_version": [
        ("r1", "eval", 0, 1, 1, 1.0, 1.0),
        ("r1", "train", 0, 4, 4, 0.75, 1.0),
        ("r1", "train", 1, 3, 1, 1.0, 1.5),
    ],
    # Of equal values the name decides, so that the answer is the same every time.
    "reward_disagreement": [
        ("r1", "a1", 1.0, "style", 1.0, "answer", 0.0, "1+1=", "3"),
        ("r1", "b0", 1.0, "parsable", 1.0, "style", 0.0, "2+2=", "4"),
        ("r1", "b1", 1.0, "parsable", 1.0, "style", 0.0, "2+2=", "4"),
        ("r1", "e0", 1.0, "answer", 1.0, "style", 0.0, "5+5=", "10"),
    ],
    "staleness": [("r1", 0, 2, 1, 0.6667), ("r1", 1, 1, 1, 0.3333)],
    # Six fine rows sampled 2 or 3 tokens (rewards 1.5, 0.5, 1, 1, 1.5, 1), c1 sampled 4 and was cut off.
    "length_vs_reward": [("r1", 2, 3, 6, 6.5 / 6, 5 / 6, 0.0), ("r1", 4, 7, 1, None, None, 1.0)],
    "reward_hacking_suspects": [],
    "learning_curve": [
        ("r1", 0, None, None, 0.25, None, None, None, None),
        ("r1", 1, 0.875, 0.25, None, None, None, 0.5, None),
        ("r1", 2, 1.5, None, 0.75, None, None, None, None),
    ],
    # train v0: a0 ended by its component, a1 did not, b0 and b1 by their end token; parsable 1, 0, 1, 1.
    "format_vs_skill": [
        ("r1", "eval", 0, 1, 1.0, None, 1.0, None),
        ("r1", "train", 0, 4, 0.75, 0.75, 0.75, 1.0),
        ("r1", "train", 1, 2, 0.5, None, 1.0, None),
    ],
    "throughput": [
        ("r1", 0, None, None, None, None, None, None),
        ("r1", 1, 4, 8, 100.0, 2, 4, 50.0),
        ("r1", 2, 3, 6, None, 1, 2, None),
    ],
    "errors": [
        ("r1", "rollout", "timeout", 1, "c0", "timeout: 5 s"),
        ("r1", "operator", "answer", 1, None, None),
    ],
    "waiting_rows": [("r1", "g3", 1, 1, "its batch")],
    "duplicates_found": [("r1", "exact_dedup", "duplicate", "b1", "b0", "2+2=", "4", "4")],
}


def rows_of(inspection: Inspection, name: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in inspection.named(name).to_pylist()]


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_a_named_query_answers_what_was_worked_out_by_hand(sample: Inspection, name: str) -> None:
    found = rows_of(sample, name)
    assert len(found) == len(ANSWERS[name])
    for row, expected in zip(found, ANSWERS[name], strict=True):
        assert row == pytest.approx(expected, nan_ok=False)


def test_every_named_query_is_tested() -> None:
    assert set(named_queries()) == {*ANSWERS, "surprising_tokens"}


def test_surprising_tokens_come_least_likely_first(sample: Inspection) -> None:
    found = sample.named("surprising_tokens").to_pylist()
    assert len(found) == 2 * 5 + 4 + 3
    assert [(row["experience_id"], row["position"], row["logprob"]) for row in found[:3]] == [
        ("c1", 4, -4.0),
        ("a1", 2, -2.5),
        ("c1", 2, -1.0),
    ]
    assert found[0]["probability"] == pytest.approx(math.exp(-4.0))
    assert found[1]["advantage"] == -0.5


def test_rows_paid_like_solved_ones_without_being_solved_are_suspects() -> None:
    # Style 3 pays a1 1.5 although its answer is wrong; solved rows earn (1.5 + 1 + 1 + 1.5 + 1) / 5 = 1.2 on average.
    with connect(sample_tables(scores=[*SCORE_ROWS, score("a1", "style", 3.0, version=2)])) as inspection:
        [row] = inspection.named("reward_hacking_suspects").to_pylist()
    assert (row["experience_id"], row["reward"], row["why"]) == ("a1", 1.5, "unsolved but paid like solved")


def test_one_reply_that_earns_on_three_tasks_is_suspected_and_so_is_a_paid_row_that_was_cut_off() -> None:
    rollouts = [
        *ROLLOUT_ROWS,
        rollout("f0", "g5", "t2", 1, "2", [(10, -0.5)]),
        rollout("f1", "g6", "t3", 1, "2", [(10, -0.5)], truncated=True),
    ]
    scores = [*SCORE_ROWS, score("f0", "style", 1.0), score("f1", "style", 1.0)]
    states = [*STATE_ROWS, state("f0", 8, "new"), state("f1", 9, "new")]
    with connect(sample_tables(rollouts=rollouts, scores=scores, rollout_state=states)) as inspection:
        found = {row["experience_id"]: row["why"] for row in inspection.named("reward_hacking_suspects").to_pylist()}
    # "2" answers t1 (a0, d0), t2 (f0) and t3 (f1); f1 was cut off besides.
    assert found == {
        "a0": "same reply to 3 tasks",
        "d0": "same reply to 3 tasks",
        "f0": "same reply to 3 tasks",
        "f1": "cut off; same reply to 3 tasks",
    }


@pytest.mark.parametrize(
    ("sibling", "expected"),
    [(None, "1 missing siblings"), ("held", "1 held siblings"), ("new", "1 siblings not curated")],
)
def test_waiting_rows_say_what_they_wait_for(sibling: str | None, expected: str) -> None:
    rollouts = [*ROLLOUT_ROWS]
    states = [row for row in STATE_ROWS if row["experience_id"] != "d0"]
    states.append(state("d0", 6, "kept"))
    if sibling is not None:
        rollouts.append(rollout("d1", "g4", "t1", 1, "2", [(10, -0.25)]))
        states.append(state("d1", 7, sibling))
    with connect(sample_tables(rollouts=rollouts, rollout_state=states)) as inspection:
        found = {row["group_id"]: row["waits_for"] for row in inspection.named("waiting_rows").to_pylist()}
    assert found["g4"] == expected


def test_dead_groups_tell_unsolved_from_solved() -> None:
    scores = [score(row, "answer", 0.0) for row in ("a0", "a1")] + [score(row, "answer", 1.0) for row in ("b0", "b1")]
    with connect(sample_tables(scores=scores)) as inspection:
        found = {row["group_id"]: row["kind"] for row in inspection.named("dead_groups").to_pylist()}
    assert found == {"g1": "none solved", "g2": "all solved"}


def test_an_unknown_query_name_lists_the_known(sample: Inspection) -> None:
    with pytest.raises(QueryError, match=r"no query is named 'dead_group'; known: dead_groups, "):
        sample.named("dead_group")


def test_every_query_and_view_begins_with_its_help() -> None:
    for query in named_queries().values():
        assert query.help.endswith("."), query.name
    with pytest.raises(ValueError, match="must begin with a comment"):
        parse_sql("x", "SELECT 1")


def test_column_notes_are_read_and_continue_on_the_next_comment_line() -> None:
    text = parse_sql("x", "-- Help.\n--   a, b: first\n--     and more\n--   c: second\nSELECT 1;")
    assert text.columns == {"a": "first and more", "b": "first and more", "c": "second"}
    assert text.sql.endswith("SELECT 1")
