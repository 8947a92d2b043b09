"""Every view over the run of `inspect_sample`; the numbers are worked out by hand from that file."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from inspect_sample import DECISION_ROWS, OPERATOR_ROWS, SCORE_ROWS, STATE_ROWS, at, decision, sample_tables, score

from buffer_engine.inspect import Inspection, connect, views
from buffer_engine.inspect.library import VIEW_ORDER, _load
from buffer_engine.schema import TABLES


def column(inspection: Inspection, sql: str) -> list[Any]:
    return inspection.query(sql).column(0).to_pylist()


def pairs(inspection: Inspection, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in inspection.rows(sql)]


def test_every_packaged_view_is_created_and_every_file_is_a_view(sample: Inspection) -> None:
    assert set(_load("views")) == set(VIEW_ORDER)
    for name in views():
        sample.query(f"SELECT * FROM {name}")


def test_every_stored_table_has_a_view_or_a_raw_relation(sample: Inspection) -> None:
    for name in TABLES:
        sample.query(f"SELECT * FROM raw.{name}")
        sample.query(f"SELECT * FROM {name}")


def test_views_over_an_empty_store_are_empty() -> None:
    with connect({}) as empty:
        for name in views():
            assert empty.query(f"SELECT * FROM {name}").num_rows == 0, name


def test_the_reward_is_the_weighted_sum_of_the_newest_scores(sample: Inspection) -> None:
    # a0: 1·1 + 0.5·1 (version 2); a1: 0 + 0.5·1; b0, b1, e0: 1 + 0; d0: 1 + 0.5. parsable has weight 0, ended none.
    assert pairs(sample, "SELECT experience_id, reward FROM experiences ORDER BY 1") == [
        ("a0", 1.5),
        ("a1", 0.5),
        ("b0", 1.0),
        ("b1", 1.0),
        ("c0", None),
        ("c1", None),
        ("d0", 1.5),
        ("e0", 1.0),
    ]


def test_a_late_score_with_a_higher_version_changes_the_reward() -> None:
    early = [row for row in SCORE_ROWS if row["version"] == 1]
    with connect(sample_tables(scores=early)) as before:
        assert column(before, "SELECT reward FROM experiences WHERE experience_id = 'a0'") == [1.25]
    # The order in which versions were written does not matter, their number does.
    with connect(sample_tables(scores=list(reversed(SCORE_ROWS)))) as after:
        assert column(after, "SELECT reward FROM experiences WHERE experience_id = 'a0'") == [1.5]


def test_a_newer_version_without_a_value_takes_the_reward_away() -> None:
    scores = [*SCORE_ROWS, score("a0", "style", None, version=3)]
    with connect(sample_tables(scores=scores)) as inspection:
        assert column(inspection, "SELECT reward FROM experiences WHERE experience_id = 'a0'") == [None]


def test_a_failed_row_has_no_reward_whatever_its_scores(sample: Inspection) -> None:
    assert pairs(sample, "SELECT reward, solved, fate, error FROM experiences WHERE experience_id = 'c0'") == [
        (None, None, "failed", "timeout: 5 s")
    ]


def test_a_row_with_metrics_only_has_no_reward() -> None:
    with connect(sample_tables(scores=[score("a0", "ended", 1.0), score("a0", "parsable", 1.0)])) as inspection:
        assert column(inspection, "SELECT reward FROM experiences WHERE experience_id = 'a0'") == [None]


def test_solved_follows_the_heaviest_component(sample: Inspection) -> None:
    assert pairs(sample, "SELECT experience_id, solved FROM experiences WHERE reward IS NOT NULL ORDER BY 1") == [
        ("a0", True),
        ("a1", False),
        ("b0", True),
        ("b1", True),
        ("d0", True),
        ("e0", True),
    ]


def test_a_penalty_as_heavy_as_the_answer_is_not_what_is_solved() -> None:
    penalty = [{**score("a0", "answer", value), "name": "overlong", "experience_id": row}
               for row, value in (("a0", 0.0), ("a1", -1.0))]  # fmt: skip
    scores = [score("a0", "answer", 1.0), score("a1", "answer", 0.0), *penalty]
    with connect(sample_tables(scores=scores)) as inspection:
        rows = pairs(inspection, "SELECT experience_id, reward, solved FROM rewards ORDER BY 1")
    assert rows == [("a0", 1.0, True), ("a1", -1.0, False)]


def test_experiences_tell_text_lengths_and_fate(sample: Inspection) -> None:
    rows = pairs(
        sample,
        "SELECT experience_id, prompt, response, token_count, total_tokens, status, fate FROM experiences ORDER BY 1",
    )
    assert rows == [
        ("a0", "1+1=", "2", 2, 4, "kept", "trained"),
        ("a1", "1+1=", "3", 2, 4, "kept", "trained"),
        ("b0", "2+2=", "4", 2, 4, "kept", "trained"),
        ("b1", "2+2=", "4", 2, 4, "rejected", "rejected"),
        ("c0", "3+3=", "", 0, 2, "rejected", "failed"),
        ("c1", "3+3=", "six", 4, 6, "kept", "reserved"),
        ("d0", "1+1=", "2", 2, 4, "held", "held"),
        ("e0", "5+5=", "10", 3, 5, "kept", "kept"),
    ]


def test_experiences_tell_who_rejected_a_row_and_how_stale_a_trained_one_was(sample: Inspection) -> None:
    rows = pairs(
        sample,
        "SELECT experience_id, rejected_by, reason, uses, trained_step, staleness, taskset FROM experiences "
        "WHERE experience_id IN ('a0', 'b0', 'b1') ORDER BY 1",
    )
    assert rows == [
        ("a0", None, None, 1, 1, 0, "sums"),
        ("b0", None, None, 1, 2, 1, "sums"),
        ("b1", "exact_dedup", "duplicate", 0, None, None, "sums"),
    ]


def test_a_released_row_no_longer_says_who_rejected_it() -> None:
    decisions = [*DECISION_ROWS, decision("b1", "release", "ann", None, "not a duplicate", "p3")]
    states = [{**row, "status": "new"} if row["experience_id"] == "b1" else row for row in STATE_ROWS]
    with connect(sample_tables(decisions=decisions, rollout_state=states)) as inspection:
        row = pairs(inspection, "SELECT rejected_by, reason, fate FROM experiences WHERE experience_id = 'b1'")
        assert row == [(None, None, "new")]
        assert pairs(inspection, "SELECT operator, status FROM drops WHERE experience_id = 'b1'") == [
            ("exact_dedup", "new")
        ]


def test_of_two_rejections_in_one_moment_the_later_committed_is_told() -> None:
    decisions = [*DECISION_ROWS, decision("b1", "reject", "people", 2, "rude", "p3")]
    with connect(sample_tables(decisions=decisions)) as inspection:
        assert pairs(inspection, "SELECT rejected_by, reason FROM experiences WHERE experience_id = 'b1'") == [
            ("people", "rude")
        ]


def test_groups_count_all_fates(sample: Inspection) -> None:
    rows = pairs(
        sample,
        "SELECT group_id, size, samples, kept, rejected, held, errors, reward_mean, reward_std, reward_min, "
        "reward_max, solved_share, status FROM groups ORDER BY 1",
    )
    # g1: rewards 1.5 and 0.5: mean 1, population deviation 0.5, one of two solved.
    assert rows == [
        ("g1", 2, 2, 2, 0, 0, 0, 1.0, 0.5, 0.5, 1.5, 0.5, "trained"),
        ("g2", 2, 2, 1, 1, 0, 0, 1.0, 0.0, 1.0, 1.0, 1.0, "trained"),
        ("g3", 2, 2, 1, 1, 0, 1, None, None, None, None, None, "reserved"),
        ("g4", 1, 1, 0, 0, 1, 0, 1.5, 0.0, 1.5, 1.5, 1.0, "incomplete"),
        ("ge", 1, 1, 1, 0, 0, 0, 1.0, 0.0, 1.0, 1.0, 1.0, "kept"),
    ]


def test_scores_say_which_version_counts(sample: Inspection) -> None:
    assert pairs(
        sample,
        "SELECT version, value, source, is_current FROM scores "
        "WHERE experience_id = 'a0' AND name = 'style' ORDER BY version",
    ) == [(1, 0.5, "operator", False), (2, 1.0, "human", True)]
    assert column(sample, "SELECT count(*) FROM scores WHERE is_current") == [len(SCORE_ROWS) - 1]


def test_reward_components_gather_the_newest_values(sample: Inspection) -> None:
    [row] = sample.rows(
        "SELECT components, by_name['style'] AS style FROM reward_components WHERE experience_id = 'a0'"
    )
    assert [(part["name"], part["value"], part["version"]) for part in row["components"]] == [
        ("answer", 1.0, 1),
        ("ended", 1.0, 1),
        ("parsable", 1.0, 1),
        ("style", 1.0, 2),
    ]
    assert row["style"] == 1.0


def test_drops_show_the_reason_and_the_prompt_that_was_lost(sample: Inspection) -> None:
    rows = pairs(sample, "SELECT experience_id, operator, reason, detail, ref_id, prompt FROM drops ORDER BY 1")
    assert rows == [
        ("b1", "exact_dedup", "duplicate", "same response", "b0", "2+2="),
        ("c0", "intake", "error:timeout", "timeout: 5 s", None, "3+3="),
    ]


def test_transcripts_have_one_line_per_message(sample: Inspection) -> None:
    rows = pairs(sample, "SELECT position, role, content FROM transcripts WHERE experience_id = 'a0' ORDER BY position")
    assert rows == [(0, "system", "Answer."), (1, "user", "1+1="), (2, "assistant", "2")]
    # Seven rows with three messages, and c0 without a reply.
    assert column(sample, "SELECT count(*) FROM transcripts") == [7 * 3 + 2]


def test_tokens_have_one_line_per_token_with_log_prob_and_advantage(sample: Inspection) -> None:
    rows = pairs(
        sample,
        "SELECT position, token_id, sampled, logprob, advantage FROM tokens WHERE experience_id = 'a0' ORDER BY 1",
    )
    assert rows == [
        (0, 1, False, None, None),
        (1, 2, False, None, None),
        (2, 10, True, -0.25, 0.5),
        (3, 3, True, -0.5, 0.5),
    ]
    assert column(sample, "SELECT count(*) FROM tokens WHERE sampled") == [2 * 5 + 4 + 3]


def test_tokens_of_rows_that_no_model_sampled_have_no_log_prob() -> None:
    tables = sample_tables()
    rows = [{**row, "logprobs": None} for row in tables["rollouts"].to_pylist()]
    with connect(sample_tables(rollouts=rows)) as inspection:
        assert column(inspection, "SELECT count(*) FROM tokens") == [4 * 5 + 2 + 6 + 5]
        assert column(inspection, "SELECT count(logprob) FROM tokens") == [0]


def test_the_newest_batch_gives_a_token_its_advantage() -> None:
    tables = sample_tables()
    again = {**tables["batch_rows"].to_pylist()[0], "batch_id": "batch-2", "position": 1, "advantage": -0.125}
    with connect(sample_tables(batch_rows=[again, *tables["batch_rows"].to_pylist()])) as inspection:
        advantages = column(inspection, "SELECT DISTINCT advantage FROM tokens WHERE experience_id = 'a0' AND sampled")
    assert advantages == [-0.125]


def test_token_texts_come_from_a_vocabulary_when_one_is_given() -> None:
    vocabulary = pa.table({"token_id": pa.array([10], pa.int32()), "text": ["two"]})
    with connect(sample_tables(), vocabulary=vocabulary) as inspection:
        rows = pairs(inspection, "SELECT token_id, token_text FROM tokens WHERE experience_id = 'a0' ORDER BY position")
    assert rows == [(1, None), (2, None), (10, "two"), (3, None)]


def test_batches_join_the_manifest_with_its_state(sample: Inspection) -> None:
    rows = pairs(
        sample,
        "SELECT batch_id, step, status, model_version, rows, groups, reward_mean, advantage_mean, staleness_max "
        "FROM batches ORDER BY batch_id",
    )
    # batch-1: rewards used 1.25 and 0.5 (before the late score), advantages +0.5 and -0.5.
    assert rows == [
        ("batch-1", 1, "committed", 0, 2, 1, 0.875, 0.0, 0),
        ("batch-2", 2, "committed", 1, 1, 1, 1.0, 0.25, 1),
        ("batch-3", None, "reserved", None, 1, None, None, None, None),
    ]


def test_staleness_is_the_batch_version_less_the_rollout_version(sample: Inspection) -> None:
    rows = pairs(
        sample,
        "SELECT experience_id, batch_model_version, rollout_model_version, staleness FROM staleness ORDER BY 1",
    )
    assert rows == [("a0", 0, 0, 0), ("a1", 0, 0, 0), ("b0", 1, 0, 1)]


def test_the_funnel_sums_passes_with_the_intake_first(sample: Inspection) -> None:
    rows = pairs(sample, "SELECT operator, passes, rows_in, kept, rejected, held, scored, nulls, errors FROM funnel")
    assert rows == [
        ("intake", 2, 7, 6, 1, 0, 0, 0, 0),
        ("exact_dedup", 2, 6, 5, 1, 0, 0, 0, 0),
        ("answer", 2, 5, 5, 0, 0, 4, 1, 1),
        ("people", 2, 5, 4, 0, 1, 0, 0, 0),
    ]


def test_the_books_of_a_sound_run_balance(sample: Inspection) -> None:
    rows = pairs(sample, "SELECT check_name, scope, expected, found, balanced FROM conservation")
    assert ("rollouts = new + kept + rejected + held", "train", 7, 7, True) in rows
    assert ("kept = trained + reserved + waiting", "train", 4, 4, True) in rows
    assert ("uses = rows of committed batches", "train", 3, 3, True) in rows
    assert ("rows in = kept + rejected + held", "exact_dedup", 6, 6, True) in rows
    assert ("rejected + held = decisions", "people", 1, 1, True) in rows
    # Held-out rows never train: they are not waiting to.
    assert ("held-out kept = not trained", "eval", 1, 1, True) in rows
    assert all(balanced for *_, balanced in rows)
    assert len(rows) == 3 * 2 + 2 * 4


def without(rows: list[dict[str, Any]], experience_id: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["experience_id"] != experience_id]


@pytest.mark.parametrize(
    ("replaced", "broken"),
    [
        ({"rollout_state": without(STATE_ROWS, "b1")}, {("rollouts = new + kept + rejected + held", "train")}),
        (
            {"rollout_state": [{**row, "uses": 2} if row["experience_id"] == "b0" else row for row in STATE_ROWS]},
            {("uses = rows of committed batches", "train")},
        ),
        (
            {"rollout_state": [{**row, "uses": 0} if row["experience_id"] == "b0" else row for row in STATE_ROWS]},
            {("uses = rows of committed batches", "train"), ("kept = trained + reserved + waiting", "train")},
        ),
        (
            {"operator_runs": [{**row, "kept": row["kept"] - (row["position"] == 1)} for row in OPERATOR_ROWS]},
            {("rows in = kept + rejected + held", "answer")},
        ),
        ({"decisions": without(DECISION_ROWS, "d0")}, {("rejected + held = decisions", "people")}),
    ],
    ids=["row lost", "trained twice", "training forgotten", "operator loses a row", "unexplained drop"],
)
def test_the_books_show_what_does_not_balance(replaced: dict[str, Any], broken: set[tuple[str, str]]) -> None:
    with connect(sample_tables(**replaced)) as inspection:
        found = pairs(inspection, "SELECT check_name, scope FROM conservation WHERE NOT balanced")
    assert set(found) == broken


def test_one_pass_too_many_is_not_hidden_by_one_too_few() -> None:
    # In pass p1 the operator loses a row, in p2 it invents one: the sums agree, the books do not.
    shift = {"p1": -1, "p2": 1}
    runs = [{**row, "kept": row["kept"] + shift[row["pass_id"]] * (row["position"] == 1)} for row in OPERATOR_ROWS]
    with connect(sample_tables(operator_runs=runs)) as inspection:
        rows = pairs(inspection, "SELECT check_name, expected, found FROM conservation WHERE NOT balanced")
    assert rows == [("rows in = kept + rejected + held", 5, 5)]


def test_of_repeated_metrics_the_newest_record_counts(sample: Inspection) -> None:
    rows = pairs(sample, "SELECT step, value FROM metrics WHERE name = 'eval/heldout/solve_rate'")
    assert rows == [(0, 0.25), (2, 0.75)]
    assert column(sample, "SELECT value FROM metrics WHERE name = 'train/grad_norm'") == [None]


def test_a_metric_recorded_anew_as_undefined_is_undefined() -> None:
    rows = [
        {"run_id": "r1", "step": 1, "name": "m", "value": 2.0, "recorded_at": at(1)},
        {"run_id": "r1", "step": 1, "name": "m", "value": None, "recorded_at": at(2)},
    ]
    with connect(sample_tables(metrics=rows)) as inspection:
        assert column(inspection, "SELECT value FROM metrics") == [None]


def test_runs_summarise_how_far_a_run_came(sample: Inspection) -> None:
    [row] = sample.rows("SELECT * FROM runs")
    assert (row["run_id"], row["model_version"], row["steps"], row["rollouts"], row["eval_rollouts"]) == (
        "r1", 2, 2, 8, 1,
    )  # fmt: skip
    assert (row["errors"], row["kept"], row["rejected"], row["held"], row["trained"]) == (1, 5, 2, 1, 3)
    assert (row["solve_rate_first"], row["solve_rate_last"]) == (0.25, 0.75)
    assert (row["started_at"], row["last_written_at"]) == (at(1), at(8))


def test_the_question_of_the_tutorial_works(sample: Inspection) -> None:
    rows = pairs(sample, "SELECT model_version, count(*), avg(reward) FROM experiences GROUP BY ALL ORDER BY 1")
    # v0: 1.5, 0.5, 1, 1, 1 → 1; v1: only d0 has a reward.
    assert rows == [(0, 5, 1.0), (1, 3, 1.5)]
    assert math.isclose(rows[0][2], 1.0)


def test_filters_and_projections_reach_the_arrow_scan(sample: Inspection) -> None:
    plan = sample.query("EXPLAIN SELECT experience_id FROM rollouts WHERE model_version = 1").column(1).to_pylist()[0]
    scan = plan[plan.index("Python Arrow Scan") :]
    assert 'Filters: "model_version" = 1' in scan
    assert "token_ids" not in plan
    assert "messages" not in plan
