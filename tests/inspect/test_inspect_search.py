"""Full-text search: what it finds in which order, how it follows the store, and what it says of bad input."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inspect_sample import PROMPTS, ROWS, at, message, rollout, sample_tables

from buffer_engine.inspect import Inspection, QueryError, StoreAt, connect, connect_store, connect_stores
from buffer_engine.schema import TABLES
from buffer_engine.store.layout import SEARCH_INDEX
from buffer_engine.store.opening import open_store

HERE = Path(__file__).parent


def says(experience_id: str, *replies: str) -> dict[str, Any]:
    """A rollout of task t1 whose only messages are these replies."""
    row = rollout(experience_id, f"g-{experience_id}", "t1", 0, None, [(10, -0.5)])
    return {**row, "messages": [message("assistant", reply) for reply in replies]}


def over(*rows: dict[str, Any]) -> Inspection:
    return connect(sample_tables(rollouts=list(rows)))


def append(folder: Path, *rows: dict[str, Any]) -> int:
    with open_store(folder, durability="process") as store:
        store.append("tasks", pa.Table.from_pylist(ROWS["tasks"], schema=TABLES["tasks"].schema))
        return store.append("rollouts", pa.Table.from_pylist(list(rows), schema=TABLES["rollouts"].schema)).version


def found(inspection: Inspection, words: str) -> list[str]:
    return [row["experience_id"] for row in inspection.search(words).to_pylist()]


def test_relevance_is_bm25_over_distinct_messages() -> None:
    # Four documents of 1, 2, 4 and 5 words, 3 on average; "apple" is in two of them, once and twice.
    # BM25, k1 1.2 and b 0.75: idf · f · 2.2 / (f + 1.2 · (0.25 + 0.75 · length / 3)).
    # idf = ln((4 − 2 + 0.5) / (2 + 0.5)) is 0, which FTS5 takes as 1e-6.
    rows = (says("r0", "pear"), says("r1", "apple pie"), says("r2", "apple or apple cake"), says("r3", "a b c d e"))
    with over(*rows) as inspection:
        hits = inspection.search("apple").to_pylist()

    def bm25(frequency: int, length: int) -> float:
        return 1e-6 * frequency * 2.2 / (frequency + 1.2 * (0.25 + 0.75 * length / 3))

    assert [hit["experience_id"] for hit in hits] == ["r2", "r1"]
    assert [hit["relevance"] for hit in hits] == pytest.approx([bm25(2, 4), bm25(1, 2)], rel=1e-9)
    assert hits[0]["snippet"] == "[apple] or [apple] cake"


def test_a_rare_word_counts_more_than_a_frequent_one() -> None:
    # idf of a word in one of six documents: ln(5.5 / 1.5), in four of six: 1e-6. All documents have two words.
    rows = [says(f"r{place}", f"common w{place}") for place in range(4)]
    with over(*rows, says("r4", "rare thing"), says("r5", "some else")) as inspection:
        hits = inspection.search("rare OR common").to_pylist()
    assert [hit["experience_id"] for hit in hits] == ["r4", "r0", "r1", "r2", "r3"]
    assert hits[0]["relevance"] == pytest.approx(math.log(5.5 / 1.5))


def test_prompts_and_replies_are_found_with_place_role_reward_and_fate(sample: Inspection) -> None:
    assert sample.search("six").to_pylist() == [
        {
            "relevance": pytest.approx(2.0, abs=1.0), "experience_id": "c1", "position": 2, "role": "assistant",
            "snippet": "[six]", "reward": None, "fate": "reserved",
        }
    ]  # fmt: skip
    prompt = '"' + PROMPTS["t1"] + '"'
    assert [(row["experience_id"], row["position"], row["role"]) for row in sample.search(prompt).to_pylist()] == [
        ("a0", 1, "user"), ("a1", 1, "user"), ("d0", 1, "user"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        ("gradient descent", ["r0", "r1"]),
        ('"gradient descent"', ["r0"]),
        ("gradient NOT descent", ["r2"]),
        ("desc*", ["r0", "r1"]),
        ("GRADIENT naive", ["r2"]),
        ("descend", []),
    ],
)
def test_words_phrases_beginnings_and_accents(words: str, ids: list[str]) -> None:
    rows = (says("r0", "gradient descent"), says("r1", "descent of a gradient"), says("r2", "Gradient, naïve"))
    with over(*rows) as inspection:
        assert sorted(found(inspection, words)) == ids


def test_search_is_a_table_in_any_query(sample: Inspection) -> None:
    rows = sample.rows(
        "SELECT experiences.group_id, count(*) AS hits FROM search('2') JOIN experiences USING (experience_id) "
        "WHERE role = 'assistant' AND experience_id NOT IN (SELECT experience_id FROM search('six')) "
        "GROUP BY ALL ORDER BY 1"
    )
    assert rows == [{"group_id": "g1", "hits": 1}, {"group_id": "g4", "hits": 1}]
    assert sample.rows("SELECT 'search(x' AS search -- search(y)") == [{"search": "search(x"}]


def test_quotes_inside_a_search_are_doubled_as_in_sql() -> None:
    with over(says("r0", "it's so")) as inspection:
        assert inspection.rows("SELECT snippet FROM search('\"it''s\"')") == [{"snippet": "[it's] so"}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("2+2=", r"the search '2\+2=' cannot be understood .*: \"2\+2=\"$"),
        ("a AND", "cannot be understood"),
        ("role:user", "no such column: role"),
        ("  ", "search for what"),
    ],
)
def test_words_that_cannot_be_understood_are_explained(sample: Inspection, words: str, said: str) -> None:
    with pytest.raises(QueryError, match=said):
        sample.search(words)


def test_a_search_that_is_no_plain_text_is_refused(sample: Inspection) -> None:
    with pytest.raises(QueryError, match="plain text in single quotes"):
        sample.query("FROM search($1)", ["six"])


def test_a_later_search_sees_what_was_written_since_and_an_earlier_version_does_not(tmp_path: Path) -> None:
    first = append(tmp_path / "s", says("r0", "one word"), says("r1", "another"))
    with connect_store(tmp_path / "s") as inspection:
        assert found(inspection, "word") == ["r0"]
        append(tmp_path / "s", says("r2", "word"), says("r3", "one word"))
        assert found(inspection, "word") == ["r0"]
        inspection.refresh()
        assert sorted(found(inspection, "word")) == ["r0", "r2", "r3"]
    # The index on disk is ahead of this version.
    with connect_store(tmp_path / "s", until=first) as before:
        assert found(before, "word") == ["r0"]
    assert (tmp_path / "s" / SEARCH_INDEX).exists()


def test_the_index_is_not_built_twice(tmp_path: Path) -> None:
    append(tmp_path / "s", *(says(f"r{place}", f"word {place}") for place in range(50)))
    for _ in range(2):
        with connect_store(tmp_path / "s") as inspection:
            assert len(found(inspection, "word")) == 50
    with sqlite3.connect(tmp_path / "s" / SEARCH_INDEX) as index:
        assert index.execute("SELECT count(*), count(DISTINCT ordinal) FROM places").fetchone() == (50, 50)
        assert index.execute("INSERT INTO words (words) VALUES ('integrity-check')").fetchall() == []


def test_erased_rows_vanish_and_texts_of_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    append(folder, says("r0", "secret plan", "shared"), says("r1", "shared"), says("r2", "other"))
    with connect_store(folder) as inspection:
        assert found(inspection, "secret") == ["r0"]
        with open_store(folder, durability="process") as store:
            erasure = {
                "experience_id": "r0", "run_id": "r1", "rule": "all", "reason": "asked", "author": "ann", "tokens": 3,
                "erased_at": at(9),
            }  # fmt: skip
            store.append("erasures", pa.Table.from_pylist([erasure], schema=TABLES["erasures"].schema))
        inspection.refresh()
        assert found(inspection, "secret") == []
        assert found(inspection, "shared") == ["r1"]
    with sqlite3.connect(folder / SEARCH_INDEX) as index:
        index.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert b"secret" not in (folder / SEARCH_INDEX).read_bytes()


def test_an_index_of_another_store_is_made_anew(tmp_path: Path) -> None:
    append(tmp_path / "one", says("r0", "word"), says("r1", "word"))
    append(tmp_path / "two", says("x0", "word"))
    with connect_store(tmp_path / "one") as inspection:
        assert len(found(inspection, "word")) == 2
    (tmp_path / "one" / SEARCH_INDEX).rename(tmp_path / "two" / SEARCH_INDEX)
    with connect_store(tmp_path / "two") as inspection:
        assert found(inspection, "word") == ["x0"]


def test_a_damaged_index_is_named_and_may_be_deleted(tmp_path: Path) -> None:
    append(tmp_path / "s", says("r0", "word"))
    (tmp_path / "s" / SEARCH_INDEX).write_bytes(b"not a database" * 1000)
    with connect_store(tmp_path / "s") as inspection, pytest.raises(QueryError, match="delete the file"):
        inspection.search("word")
    (tmp_path / "s" / SEARCH_INDEX).unlink()
    with connect_store(tmp_path / "s") as inspection:
        assert found(inspection, "word") == ["r0"]


def test_several_stores_are_searched_together(tmp_path: Path) -> None:
    append(tmp_path / "one", says("r0", "word here"))
    append(tmp_path / "two", says("r0", "word there"), says("r1", "none"))
    with connect_stores({name: StoreAt(tmp_path / name) for name in ("one", "two")}) as inspection:
        rows = inspection.rows("SELECT store, experience_id, snippet FROM search('word') ORDER BY store")
    assert rows == [
        {"store": "one", "experience_id": "r0", "snippet": "[word] here"},
        {"store": "two", "experience_id": "r0", "snippet": "[word] there"},
    ]


WRITER = textwrap.dedent(
    """
    import sys
    sys.path[:0] = sys.argv[2:]
    import pyarrow as pa
    from buffer_engine.schema import TABLES
    from buffer_engine.store.opening import open_store
    from test_inspect_search import append, says

    append(sys.argv[1], says("w0-0", "word"))
    print("ready", flush=True)
    with open_store(sys.argv[1], durability="process") as store:
        for number in range(1, 5_000):
            rows = [says(f"w{number}-0", f"word {number}"), says(f"w{number}-1", "else")]
            store.append("rollouts", pa.Table.from_pylist(rows, schema=TABLES["rollouts"].schema))
    """
)


def test_searching_while_another_process_writes_finds_exactly_what_the_version_holds(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "live"), str(HERE)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        sizes: list[int] = []
        with connect_store(tmp_path / "live") as one, connect_store(tmp_path / "live") as other:
            for _ in range(8):
                for inspection in (one, other):
                    inspection.refresh()
                    [held] = inspection.rows("SELECT count(*) AS rows FROM rollouts WHERE experience_id LIKE 'w%-0'")
                    hits = found(inspection, "word")
                    assert len(hits) == len(set(hits)) == held["rows"]
                    sizes.append(len(hits))
        assert sizes[-1] > sizes[0]
    finally:
        writer.kill()
        writer.wait()


WORDS = st.text("abc ", min_size=1, max_size=12)


@settings(max_examples=30, deadline=None)
@given(replies=st.lists(st.lists(WORDS, max_size=3), min_size=1, max_size=12), word=st.sampled_from(["a", "ab", "c"]))
def test_a_word_is_found_exactly_where_a_message_holds_it(replies: list[list[str]], word: str) -> None:
    with over(*(says(f"r{place}-0", *texts) for place, texts in enumerate(replies))) as inspection:
        hits = {(row["experience_id"], row["position"]) for row in inspection.search(word).to_pylist()}
    assert hits == {
        (f"r{place}-0", position)
        for place, texts in enumerate(replies)
        for position, text in enumerate(texts)
        if word in text.split()
    }
