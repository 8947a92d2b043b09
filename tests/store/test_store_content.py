"""The content hash, pinned to its definition, and random rows through a whole store."""

from __future__ import annotations

import struct
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash
from backends import examples, open_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_rows import rollout, rollouts, score, table

from buffer_engine.schema import TABLES
from buffer_engine.store.content import row_hashes

pytestmark = pytest.mark.usefixtures("backend")


def hashes(name: str, rows: pa.Table) -> list[bytes]:
    return [one for batch in rows.to_batches() for one in row_hashes(TABLES[name], batch)]


def test_the_hash_of_a_score_is_the_one_its_layout_defines() -> None:
    # by hand, in schema order without scored_at: text lengths as int32 (-1: null), doubles, version with its mark
    fixed = struct.pack("<ii", 2, 6) + struct.pack("<dd", 0.5, 1.0) + struct.pack("<ii", 8, 2)
    fixed += struct.pack("<i", 3) + b"\x01" + struct.pack("<i", 3) + struct.pack("<i", -1)
    expected = xxhash.xxh3_128_digest(fixed + b"x1" + b"answer" + b"operator" + b"me" + b"run")
    rows = table("scores", [score("x1", 0.5, author="me", version=3)])
    assert hashes("scores", rows) == [expected]


def test_the_hash_does_not_depend_on_neighbours_or_slicing() -> None:
    rows = [rollout(0, error=None), rollout(1, error="e: x", logprobs=None, sampling=None), rollout(2, messages=[])]
    together = table("rollouts", rows)
    alone = [hashes("rollouts", table("rollouts", [row]))[0] for row in rows]
    assert hashes("rollouts", together) == alone
    assert hashes("rollouts", together.slice(1)) == alone[1:]
    assert len(set(alone)) == 3


def test_text_may_not_move_between_neighbouring_columns_unnoticed() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    rows = table("rollouts", [rollout(0, made_by=one, run_id=other) for one, other in pairs])
    assert len(set(hashes("rollouts", rows))) == 4


text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
message = st.fixed_dictionaries(
    {"role": text, "content": st.none() | text, "tool_calls": st.none() | text, "tool_call_id": st.none() | text,
     "media": st.none() | st.lists(text, max_size=3)}
)  # fmt: skip
finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
moments = st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1)).map(lambda moment: moment.replace(tzinfo=UTC))


@st.composite
def random_rollout(draw: st.DrawFn) -> dict[str, Any]:
    length = draw(st.integers(0, 6))

    def each(element: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(element, min_size=length, max_size=length))

    return rollout(
        draw(st.integers(0, 10**6)),
        messages=draw(st.lists(message, max_size=3)),
        token_ids=each(st.integers(-(2**31), 2**31 - 1)),
        loss_mask=each(st.booleans()),
        logprobs=each(st.none() | finite) if draw(st.booleans()) else None,
        token_versions=draw(st.lists(st.fixed_dictionaries({"version": st.integers(0, 2**60), "length": st.none()}))),
        error=draw(st.none() | text), info_json=draw(text), model_version=draw(st.none() | st.integers(0, 2**62)),
        parent_id=draw(st.none() | text),
        sampling=draw(st.none() | st.just(rollout(0)["sampling"] | {"top_p": None, "seed": -1})),
        created_at=draw(moments),
    )  # fmt: skip


def test_random_rollouts_come_back_equal_and_repeat_without_effect() -> None:
    @settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(random_rollout(), min_size=1, max_size=5, unique_by=lambda row: row["experience_id"]), st.data())
    def holds(rows: list[dict[str, Any]], data: st.DataObject) -> None:
        cut = data.draw(st.integers(0, len(rows)))
        with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "s", durability="process") as store:
            given_rows = table("rollouts", rows)
            store.append("rollouts", given_rows.slice(0, cut))
            store.append("rollouts", given_rows.slice(cut))
            assert store.table("rollouts").to_pylist() == given_rows.to_pylist()
            later = [row | {"created_at": row["created_at"] + timedelta(seconds=1)} for row in reversed(rows)]
            assert store.append("rollouts", table("rollouts", later)).appended == {"rollouts": 0}
            ids = [row["experience_id"] for row in reversed(rows)]
            assert store.fetch(ids, columns=["experience_id"]).column(0).to_pylist() == ids
            assert store.verify() == []

    holds()


def test_rows_with_large_lists_survive(tmp_path: Path) -> None:
    big = table(
        "rollouts", [rollout(0, token_ids=[7] * 100_000, loss_mask=[True] * 100_000, logprobs=[-1.0] * 100_000)]
    )
    with open_store(tmp_path / "s") as store:
        store.append("rollouts", pa.concat_tables([big, rollouts([1])]))
        assert store.fetch(["x0"]).column("token_ids").to_pylist() == [[7] * 100_000]
