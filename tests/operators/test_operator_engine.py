"""The engine: doors, errors, scores, the reward between operators, and the balance of rows."""

from __future__ import annotations

import itertools
from typing import Any

import odd_operators
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_rows import NOW, config, message, scores

from buffer_engine.errors import ConservationError, OperatorError
from buffer_engine.schema import DECISIONS, OPERATOR_RUNS, SCORES
from operators.engine import CurationResult, run_operators
from operators.frame import MESSAGES
from operators.plan import compile_operators

SCHEMA = {
    "experience_id": pl.String, "task_id": pl.String, "group_id": pl.String, "error": pl.String,
    "response": pl.String, "answer": pl.String, "level": pl.Int64, "sample_index": pl.Int32, "token_count": pl.Int64,
    "prompt": pl.String, "reward": pl.Float64,
}  # fmt: skip
INFO = {"answer": pl.String(), "level": pl.Int64()}


@pytest.fixture(autouse=True)
def _odd(monkeypatch: pytest.MonkeyPatch) -> None:
    odd_operators.register(monkeypatch)
    odd_operators.Failing.seen.clear()


def rows(*responses: str, **columns: Any) -> pl.DataFrame:
    """Rows x0, x1, …: groups of two, gold answer 4."""
    height = len(responses)
    given = {
        "experience_id": [f"x{row}" for row in range(height)], "task_id": ["t"] * height,
        "group_id": [f"g{row // 2}" for row in range(height)], "error": [None] * height, "response": list(responses),
        "answer": ["4"] * height, "level": list(range(height)), "sample_index": [row % 2 for row in range(height)],
        "token_count": [len(text) for text in responses], "prompt": ["p"] * height, "reward": [None] * height,
    }  # fmt: skip
    return pl.DataFrame(given | columns, schema=SCHEMA)


def run(frame: pl.DataFrame, *configs: Any, **options: Any) -> CurationResult:
    known = {"has_reward": options.pop("has_reward", False), "components": options.pop("components", ())}
    with compile_operators(configs, available=INFO, **known) as plan:
        return run_operators(
            plan,
            frame,
            **({"seed": 1, "step": 2, "model_version": 3, "pass_id": "p", "run_id": "r", "now": NOW} | options),
        )


def fates(result: CurationResult) -> dict[str, tuple[str, str, str]]:
    """Experience → (verdict, operator, reason), masks left out."""
    found = [row for row in result.decisions.to_pylist() if row["verdict"] != "mask"]
    assert len({row["experience_id"] for row in found}) == len(found)
    return {row["experience_id"]: (row["verdict"], row["operator"], row["reason"]) for row in found}


def test_the_tables_have_the_stores_schemas_and_the_chain_of_counts_closes():
    frame = rows("4", "5", "44", "4", "x", "y").with_columns(
        error=pl.Series([None, None, None, None, "timeout: 3 s", None], dtype=pl.String)
    )
    result = run(
        frame, config("length_filter", max=1), config("regex_or_exact_match", id="right", gold="answer", weight=2.0)
    )
    assert result.decisions.schema == DECISIONS.schema
    assert result.scores.schema == SCORES.schema
    assert result.runs.schema == OPERATOR_RUNS.schema
    assert fates(result) == {
        "x0": ("keep", "pipeline", "kept"),
        "x1": ("keep", "pipeline", "kept"),
        "x2": ("reject", "length_filter", "too_long"),
        "x3": ("keep", "pipeline", "kept"),
        "x4": ("reject", "intake", "error:timeout"),
        "x5": ("keep", "pipeline", "kept"),
    }
    counts = [
        (run["position"], run["operator"], run["rows_in"], run["kept"], run["rejected"], run["scored"])
        for run in result.runs.to_pylist()
    ]
    assert counts == [(-1, "intake", 6, 5, 1, 0), (0, "length_filter", 5, 4, 1, 0), (1, "right", 4, 4, 0, 4)]
    given = {row["experience_id"]: (row["value"], row["weight"], row["version"]) for row in result.scores.to_pylist()}
    assert given == {"x0": (1.0, 2.0, 1), "x1": (0.0, 2.0, 1), "x3": (1.0, 2.0, 1), "x5": (0.0, 2.0, 1)}
    assert result.survivors["right"].to_list() == [1.0, 0.0, 1.0, 0.0]
    keeps = result.decisions.filter(pa.compute.equal(result.decisions["verdict"], "keep"))
    assert keeps["position"].to_pylist() == [None] * 4


def test_no_operators_keep_everything_and_an_empty_frame_gives_empty_tables():
    assert {fate[0] for fate in fates(run(rows("a", "b"))).values()} == {"keep"}
    empty = run(rows(), config("length_filter", max=1), config("regex_or_exact_match", gold="answer"))
    assert empty.decisions.num_rows == empty.scores.num_rows == 0
    assert empty.runs["rows_in"].to_pylist() == [0, 0, 0]


def test_a_filter_that_takes_everything_leaves_the_rest_of_the_pipeline_running_on_nothing():
    result = run(
        rows("aa", "bb"),
        config("length_filter", max=1),
        config("regex_or_exact_match", id="right", gold="answer"),
        config("group_reward_std", column="right"),
        config("exact_dedup"),
    )
    assert {fate[:2] for fate in fates(result).values()} == {("reject", "length_filter")}
    assert result.survivors.height == 0
    assert result.runs["rows_in"].to_pylist() == [2, 2, 0, 0, 0]


def test_failed_rollouts_are_never_seen_by_an_operator():
    frame = rows("a", "b", error=[None, "timeout: 3 s"])
    result = run(frame, config("failing"))
    assert odd_operators.Failing.seen == [["x0"]]
    decision = next(row for row in result.decisions.to_pylist() if row["experience_id"] == "x1")
    assert (decision["reason"], decision["detail"], decision["position"]) == ("error:timeout", "timeout: 3 s", None)


def test_one_raising_row_costs_one_row_and_keeps_its_exception():
    result = run(rows("a", "b", "drop", "d", "e", "f", "g"), config("failing", bad=["x3"]))
    assert fates(result)["x3"] == ("reject", "failing", "error")
    assert fates(result)["x2"] == ("reject", "failing", "asked")
    assert [name for name, fate in fates(result).items() if fate[0] == "keep"] == ["x0", "x1", "x4", "x5", "x6"]
    decision = next(row for row in result.decisions.to_pylist() if row["experience_id"] == "x3")
    assert decision["detail"] == "ValueError: cannot read x3"
    assert sorted(result.scores["experience_id"].to_pylist()) == ["x0", "x1", "x2", "x4", "x5", "x6"]
    assert result.survivors["length"].to_list() == [1] * 5
    assert result.runs.to_pylist()[1]["errors"] == 1


def test_a_raising_row_of_a_group_operator_costs_its_group():
    result = run(rows("a", "b", "c", "d", "e", "f"), config("failing", bad=["x3"], scope="group"))
    assert [name for name, fate in fates(result).items() if fate[2] == "error"] == ["x2", "x3"]
    assert all(
        seen in (["x0", "x1"], ["x2", "x3"], ["x4", "x5"]) or len(seen) > 2 for seen in odd_operators.Failing.seen
    )


def test_on_error_holds_or_stops_when_asked_to():
    held = run(rows("a", "b"), config("failing", bad=["x1"], on_error="hold"))
    assert fates(held)["x1"] == ("hold", "failing", "error")
    with pytest.raises(OperatorError, match=r"operator #0 'failing' failed on row 'x1': ValueError: cannot read x1"):
        run(rows("a", "b"), config("failing", bad=["x1"], on_error="raise"))


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("undeclared_door", OperatorError, "does not declare `drops`"),
        ("unknown_verdict", OperatorError, "gave the verdict 'drop'"),
        ("no_reason", OperatorError, "the verdict on row 0 has no reason"),
        ("two_doors", ConservationError, r"4 entries for 2 rows; row 0 \('x0'\) leaves through 2 doors"),
        ("verdict_and_error", ConservationError, r"row 0 \('x0'\) leaves through 2 doors"),
        ("row_beyond", ConservationError, "name row 2, but the frame has 2 rows"),
        ("wrong_schema", OperatorError, "verdicts have the columns"),
        ("column_undeclared", OperatorError, "wrote column 'other', which its contract lacks"),
        ("column_missing", OperatorError, "declares column 'made' but did not write it"),
        ("column_short", OperatorError, "column 'made' has 1 rows, the frame has 2"),
        ("column_type", OperatorError, "column 'made' is Float64, its contract says Int64"),
        ("score_missing", OperatorError, "declares score 'broken' but did not write it"),
        ("score_nan", OperatorError, r"score 'broken' of row 0 \('x0'\) is nan"),
        ("score_inf", OperatorError, r"score 'broken' of row 0 \('x0'\) is inf"),
        ("score_type", OperatorError, "score 'broken' is Int64"),
        ("score_undeclared", OperatorError, "wrote score 'other'"),
        ("score_flag_null", OperatorError, "`scored` has nulls"),
        ("added_orphan", ConservationError, "an added row has parent 2"),
        ("added_column", OperatorError, "they may have parent, messages and then spans"),
        ("added_type", OperatorError, "column 'bundle' of added rows is Int64, not String"),
        ("added_span", ConservationError, "a span is of row 2, but the frame has 2 rows"),
    ],
)
def test_a_result_that_breaks_its_contract_stops_the_pass_and_names_the_operator(fault, error, text):
    with pytest.raises(error, match=f"operator 'broken'.*{text}"):
        run(rows("a", "b"), config("broken", fault=fault))


def test_where_sends_only_matching_rows_in_and_null_does_not_match():
    frame = rows("aa", "bb", "cc", level=[1, 5, None])
    result = run(frame, config("length_filter", max=1, where="level > 2"))
    assert [name for name, fate in fates(result).items() if fate[0] == "reject"] == ["x1"]
    assert result.runs.to_pylist()[1]["rows_in"] == 3


def test_a_where_that_fails_on_a_row_is_an_error_of_that_row():
    frame = rows("a", "b", "c", answer=["7", "seven", "1"])
    result = run(frame, config("length_filter", max=0, where="CAST(answer AS INTEGER) > 5"))
    assert fates(result)["x0"] == ("reject", "length_filter", "too_long")
    assert fates(result)["x1"] == ("reject", "length_filter", "error")
    assert fates(result)["x2"][0] == "keep"


def test_derived_columns_reach_later_operators_and_untouched_rows_keep_their_value():
    frame = rows(" a ", " b ")
    result = run(
        frame,
        config("normalize_text", columns=["response"], where="level = 0"),
        config("length_filter", max=1),
    )
    assert {name: fate[0] for name, fate in fates(result).items()} == {"x0": "keep", "x1": "reject"}
    assert result.survivors["response"].to_list() == ["a"]


def test_components_and_reward_are_columns_for_later_operators():
    result = run(
        rows("4", "5"),
        config("regex_or_exact_match", id="right", gold="answer"),
        config("reward_shape", id="bonus", expr="right * 0.5", where="right = 1"),
        config("reward_filter", min=1.5),
    )
    # x0: 1 + 0.5; x1: 0, and no bonus
    assert fates(result) == {"x0": ("keep", "pipeline", "kept"), "x1": ("reject", "reward_filter", "too_low")}
    assert [row["experience_id"] for row in result.scores.to_pylist() if row["name"] == "bonus"] == ["x0"]
    assert result.survivors["reward"].to_list() == [1.5]


def test_curating_again_supersedes_and_does_not_see_its_own_leftovers():
    pipeline = (
        config("regex_or_exact_match", id="right", gold="answer"),
        config("reward_shape", id="bonus", expr="reward * 0.5"),
    )
    first = run(rows("4", "5"), *pipeline)
    again = run(rows("4", "5"), *pipeline, scores=first.scores)
    values = [(row["experience_id"], row["name"], row["value"], row["version"]) for row in again.scores.to_pylist()]
    assert values == [
        ("x0", "right", 1.0, 2),
        ("x1", "right", 0.0, 2),
        ("x0", "bonus", 0.5, 2),
        ("x1", "bonus", 0.0, 2),
    ]
    assert again.survivors["reward"].to_list() == [1.5, 0.0]


def test_a_stored_component_counts_in_the_reward_beside_new_ones():
    late = scores(("x0", "human", 10.0, 0.1, 3), ("x1", "human", None, 0.1, 1))
    result = run(
        rows("4", "4"),
        config("regex_or_exact_match", id="right", gold="answer"),
        config("reward_filter", min=2),
        scores=late,
    )
    # x0: 1 + 0.1 · 10; x1: its human score is null, so there is no reward
    assert result.survivors["reward"].to_list() == [2.0]
    assert fates(result)["x1"] == ("reject", "reward_filter", "null")


def test_rows_an_operator_leaves_out_keep_their_stored_score():
    stored = scores(("x0", "right", 1.0, 1.0, 1), ("x1", "right", 1.0, 1.0, 1))
    result = run(
        rows("5", "5"),
        config("regex_or_exact_match", id="right", gold="answer", where="level = 0"),
        config("reward_filter", min=0),
        scores=stored,
    )
    assert result.survivors["reward"].to_list() == [0.0, 1.0]
    assert [(row["experience_id"], row["version"]) for row in result.scores.to_pylist()] == [("x0", 2)]


def test_a_weight_of_zero_is_stored_as_a_metric():
    result = run(rows("4"), config("regex_or_exact_match", gold="answer", weight=0))
    assert result.scores["weight"].to_pylist() == [None]
    assert result.scores["value"].to_pylist() == [1.0]


def test_group_filters_over_all_count_rows_that_were_taken_out_before():
    # after the length filter g0 has only right answers left; over all it still has a wrong one
    frame = rows("4", "wrong", "4", "4")
    match = config("regex_or_exact_match", id="right", gold="answer")
    short = config("length_filter", max=1)
    survivors = run(frame, match, short, config("group_reward_std", column="right"))
    assert fates(survivors)["x0"] == ("reject", "group_reward_std", "singleton")
    everyone = run(frame, match, short, config("group_reward_std", column="right", over="all"))
    assert fates(everyone) == {
        "x0": ("keep", "pipeline", "kept"),
        "x1": ("reject", "length_filter", "too_long"),
        "x2": ("reject", "group_reward_std", "all_equal"),
        "x3": ("reject", "group_reward_std", "all_equal"),
    }


def test_masked_rows_are_kept_with_a_mask_beside():
    frame = rows("a", "b").with_columns(truncated=pl.Series([True, False]), stop_reason=pl.lit("length"))
    result = run(frame, config("truncated_mask"))
    found = [(row["experience_id"], row["verdict"]) for row in result.decisions.to_pylist()]
    assert found == [("x0", "mask"), ("x0", "keep"), ("x1", "keep")]
    assert result.runs.to_pylist()[1]["masked"] == 1


def test_added_rows_name_their_parent_and_the_operator():
    frame = rows(" a ", "b").with_columns(
        messages=pl.Series([[message("assistant", " a ")], [message("assistant", "b")]], dtype=MESSAGES),
        made_by=pl.lit("import"),
        mean_logprob=pl.lit(None, dtype=pl.Float64),
    )
    result = run(frame, config("normalize_text", id="clean", rewrite=True))
    assert result.added.to_dicts() == [{"parent_id": "x0", "made_by": "clean", "messages": [message("assistant", "a")]}]
    assert fates(result)["x0"] == ("reject", "clean", "replaced")
    assert result.runs.to_pylist()[1]["added"] == 1


def test_a_frame_that_lacks_a_column_or_doubles_a_row_is_refused():
    with pytest.raises(OperatorError, match="the frame lacks response"):
        run(rows("a").drop("response"), config("length_filter", max=1))
    with pytest.raises(ConservationError, match="'x0' more than once"):
        run(pl.concat([rows("a"), rows("b")]))


def test_the_same_pass_gives_the_same_rows():
    def once() -> CurationResult:
        return run(rows("4", "5", "4", "4"), config("chaos", salt=1), config("exact_dedup"))

    first, second = once(), once()
    assert first.decisions.equals(second.decisions)
    assert first.scores.equals(second.scores)


STEP = st.fixed_dictionaries(
    {"salt": st.integers(0, 50), "scope": st.sampled_from(["row", "group"]),
     "on_error": st.sampled_from(["reject", "hold"]), "where": st.sampled_from([None, "level > 3", "level = NULL"]),
     "weight": st.sampled_from([0.0, 1.0])}
)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(STEP, max_size=4),
    failed=st.lists(st.booleans(), max_size=24),
    order=st.randoms(use_true_random=False),
)
def test_whatever_operators_do_every_row_leaves_through_one_door(steps, failed, order):
    errors = ["env: broke" if bad else None for bad in failed]
    frame = rows(*["text"] * len(failed), error=errors)
    pipeline = [config("chaos", id=f"op{place}", **step) for place, step in enumerate(steps)]
    result = run(frame, *pipeline)
    found = fates(result)
    assert set(found) == set(frame["experience_id"])
    kept = [name for name, fate in found.items() if fate[0] == "keep"]
    assert sorted(result.survivors["experience_id"]) == sorted(kept)
    assert sum(fate[1] == "intake" for fate in found.values()) == sum(failed)
    counts = result.runs.to_pylist()
    for before, after in itertools.pairwise(counts):
        assert after["rows_in"] == before["kept"]
    for count in counts:
        assert count["rows_in"] == count["kept"] + count["rejected"] + count["held"]
        assert sum(fate[1] == count["operator"] for fate in found.values()) == count["rejected"] + count["held"]
    assert sum(count["scored"] + count["nulls"] for count in counts) == result.scores.num_rows
    if all(step["scope"] == "row" for step in steps):
        shuffled = list(range(frame.height))
        order.shuffle(shuffled)
        assert fates(run(frame[shuffled], *pipeline)) == found


def test_spans_name_their_rows_wherever_a_failing_row_made_the_frame_be_cut():
    result = run(rows("a", "b", "c", "d", "e"), config("copying", bad="x2", where="response <> 'a'"))
    assert fates(result)["x2"] == ("reject", "copying", "error")
    named = [(row["parent_id"], row["spans"][0]["experience_id"]) for row in result.added.to_dicts()]
    assert named == [("x1", "x1"), ("x3", "x3"), ("x4", "x4")]
