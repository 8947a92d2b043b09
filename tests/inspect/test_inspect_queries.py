"""Every named query over the run of `inspect_sample`, with rows worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from inspect_sample import (
    DECISION_ROWS,
    ROLLOUT_ROWS,
    SCORE_ROWS,
    STATE_ROWS,
    TASK_ROWS,
    TOKEN_STATS_ROWS,
    decision,
    rollout,
    sample_tables,
    score,
    state,
)

from buffer_engine.inspect import Inspection, QueryError, connect, named_queries
from buffer_engine.inspect.library import parse_sql

ANSWERS: dict[str, list[tuple[Any, ...]]] = {
    "dead_groups": [("r1", "g2", 0, 2, None, None, None, True, 1.0, "all solved", "trained", "t2")],
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
        ("r1", 1, 4, 300, 1.0, 300.0, 2, 30, 100, 2.0, 15.0, 50.0),
        ("r1", 2, 3, 100, 3.0, 100 / 3, 1, 10, 80, 8.0, 1.25, 10.0),
        # All tokens over all seconds, not the mean of the lines above.
        ("r1", None, 7, 400, 4.0, 100.0, 3, 40, 180, 10.0, 4.0, 18.0),
    ],
    "errors": [
        ("r1", "rollout", "timeout", 1, "c0", "timeout: 5 s"),
        ("r1", "operator", "answer", 1, None, None),
    ],
    "waiting_rows": [("r1", "g3", 1, 1, "its batch")],
    "near_duplicates": [("r1", "g2", "b0", "b1", 1.0, "trained", "rejected", "4", "4")],
    "token_drift": [],
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
    assert {row["ratio"] for row in found} == {None}


def test_surprising_tokens_show_what_the_newest_recorded_step_thought_of_them() -> None:
    with connect(sample_tables(token_stats=TOKEN_STATS_ROWS)) as inspection:
        found = {
            (row["experience_id"], row["position"]): row for row in inspection.named("surprising_tokens").to_pylist()
        }
    assert len(found) == 2 * 5 + 4 + 3
    told = [
        (row["stats_step"], row["old_logprob"], row["ratio"], row["entropy"], row["advantage"])
        for row in found.values()
    ]
    assert told[:2] == [(None, None, None, None, None), (1, -2.5, 1.0, 2.0, -0.5)]
    assert [found["a0", place]["ratio"] for place in (2, 3)] == [0.5, 1.0]


def test_token_drift_adds_up_the_recorded_tokens_of_each_step() -> None:
    # Step 1: ratios 0.5, 1, 1, 1.5, of which two leave 0.8 … 1.2; entropies 1, 0.5, 2, 0.5.
    # Step 4 recorded one row that it did not compute.
    idle = {
        **TOKEN_STATS_ROWS[0],
        "batch_id": "batch-4",
        "step": 4,
        "old_logprobs": None,
        "ratios": None,
        "entropies": None,
    }
    with connect(sample_tables(token_stats=[*TOKEN_STATS_ROWS, idle])) as inspection:
        assert rows_of(inspection, "token_drift") == [
            ("r1", 1, 2, 4, 1.0, 1.5, 0.5, 0.5, 1.0),
            ("r1", 4, 1, 2, None, None, None, None, None),
        ]


def test_near_duplicates_share_most_of_their_three_word_sequences() -> None:
    # "a b c d e f" has 4 sequences; the second has these and one more (4 of 5), the third shares 3 of 5.
    replies = {"f0": "A b c d  e f", "f1": "a b c d e f g", "f2": "a b c d e x"}
    rows = [rollout(name, "g9", "t1", 1, reply, [(10, -0.5)]) for name, reply in replies.items()]
    with connect(sample_tables(rollouts=rows, rollout_state=[])) as inspection:
        found = [
            (row["experience_id"], row["sibling_id"], row["similarity"])
            for row in inspection.named("near_duplicates").to_pylist()
        ]
    assert found == [("f0", "f1", 0.8)]


def test_rows_paid_like_solved_ones_without_being_solved_are_suspects() -> None:
    # Style 3 pays a1 1.5 although its answer is wrong; solved rows earn (1.5 + 1 + 1 + 1.5 + 1) / 5 = 1.2 on average.
    with connect(sample_tables(scores=[*SCORE_ROWS, score("a1", "style", 3.0, version=2)])) as inspection:
        [row] = inspection.named("reward_hacking_suspects").to_pylist()
    assert (row["experience_id"], row["reward"], row["why"]) == ("a1", 1.5, "unsolved but paid like solved")


def suspects(rollouts: list[dict[str, Any]], scores: list[dict[str, Any]], **other: Any) -> dict[str, str]:
    states = [state(row["experience_id"], 8 + place, "new") for place, row in enumerate(rollouts)]
    given = {"rollouts": [*ROLLOUT_ROWS, *rollouts], "scores": [*SCORE_ROWS, *scores], **other}
    with connect(sample_tables(rollout_state=[*STATE_ROWS, *states], **given)) as inspection:
        return {row["experience_id"]: row["why"] for row in inspection.named("reward_hacking_suspects").to_pylist()}


def test_a_right_answer_is_no_suspect_for_being_cut_off_or_right_elsewhere_too() -> None:
    # "2" is right for t1 (a0, d0), t2 and t3, whose gold answers are all "2"; f1 was cut off besides.
    rows = [
        rollout("f0", "g5", "t2", 1, "2", [(10, -0.5)]),
        rollout("f1", "g6", "t3", 1, "2", [(10, -0.5)], truncated=True),
    ]
    assert suspects(rows, [score("f0", "answer", 1.0), score("f1", "answer", 1.0)]) == {}


def test_one_reply_that_counts_as_right_for_three_different_gold_answers_is_suspected() -> None:
    rows = [rollout("f0", "g5", "t2", 1, "2", [(10, -0.5)]), rollout("f1", "g6", "t3", 1, "2", [(10, -0.5)])]
    golds = {"t1": '{"gold": "2"}', "t2": '{"answer": "4"}', "t3": '{"gold": "6"}'}
    tasks = [{**row, "info_json": golds.get(row["task_id"], "{}")} for row in TASK_ROWS]
    found = suspects(rows, [score("f0", "answer", 1.0), score("f1", "answer", 1.0)], tasks=tasks)
    assert found == dict.fromkeys(("a0", "d0", "f0", "f1"), "same reply right for 3 gold answers")


def test_one_unsolved_reply_is_suspected_where_it_earns_more_than_failing_usually_does() -> None:
    rows = [rollout(f"f{place}", f"g{place + 5}", f"t{place + 1}", 1, "zzz", [(9, -0.5)]) for place in range(3)]
    wrong = [score(row["experience_id"], "answer", 0.0) for row in rows]
    # Solved rows earn 1.2 on average, so more than 0.6 is well paid: style 1.5 pays 0.75, style 0.5 pays 0.25.
    well = [*wrong, *(score(row["experience_id"], "style", 1.5) for row in rows)]
    cheap = [score(f"q{place}", "answer", 0.0) for place in range(4)]
    extra = [rollout(f"q{place}", f"h{place}", "t1", 1, f"w{place}", [(9, -0.5)]) for place in range(4)]
    assert suspects([*rows, *extra], [*well, *cheap]) == dict.fromkeys(
        ("f0", "f1", "f2"), "same unsolved reply well paid on 3 tasks"
    )
    little = [*wrong, *(score(row["experience_id"], "style", 0.5) for row in rows)]
    assert suspects([*rows, *extra], [*little, *cheap]) == {}


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


def test_dead_groups_name_the_filter_and_what_it_saw_even_where_total_rewards_differ() -> None:
    # g1's rewards 1.5 and 0.5 differ: the filter judged another column. g4's only member has no spread to tell.
    decisions = [
        *DECISION_ROWS,
        *(
            decision(row, "reject", "flat", 3, "low_std", "p3", detail="std 0.125 of 2 rows, min_std 0.2")
            for row in ("a0", "a1")
        ),
        decision("d0", "reject", "flat", 3, "singleton", "p3", detail="the only member with style"),
        decision("b1", "reject", "other", 4, "duplicate", "p3"),
    ]
    with connect(sample_tables(decisions=decisions)) as inspection:
        found = inspection.named("dead_groups").to_pylist()
    assert [
        (row["group_id"], row["rejected_by"], row["reason"], row["spread"], row["reward_equal"]) for row in found
    ] == [
        ("g1", "flat", "low_std", 0.125, False),
        ("g2", None, None, None, True),
        ("g4", "flat", "singleton", None, False),
    ]


def test_kept_rows_of_a_run_without_a_trainer_wait_for_nothing() -> None:
    nothing: dict[str, list[dict[str, Any]]] = {name: [] for name in ("batches", "batch_rows", "models", "batch_state")}
    states = [{**row, "uses": 0, "reserved_by": None, "trained_step": None} for row in STATE_ROWS]
    with connect(sample_tables(rollout_state=states, **nothing)) as inspection:
        assert inspection.named("waiting_rows").num_rows == 0
        fates = inspection.rows("SELECT DISTINCT fate FROM experiences WHERE status = 'kept'")
        books = inspection.rows("SELECT * FROM conservation WHERE check_name LIKE 'kept%'")
        [run] = inspection.rows("FROM runs")
        groups = inspection.rows("SELECT DISTINCT status FROM groups WHERE group_id IN ('g1', 'g2')")
    assert fates == [{"fate": "kept"}]
    assert groups == [{"status": "kept"}]
    assert [(book["check_name"], book["expected"], book["found"], book["detail"]) for book in books] == [
        ("kept without a trainer = not trained", 4, 4, "kept 4: the run has no trainer; trained 0, reserved 0")
    ]
    assert (run["has_trainer"], run["explored_rounds"], run["curation_passes"]) == (False, 2, 2)


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
