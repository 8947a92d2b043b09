"""Databases that Trinity-RFT's own code wrote (three versions of it), and bytes that nobody should run."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import sqlite3
import struct
from collections import OrderedDict
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from buffer_engine.errors import ExchangeError, UsageError
from buffer_engine.exchange.incoming import Importer, ImportReceipt, OnInvalid
from buffer_engine.exchange.pickle_tree import Name, UnreadablePickle, plain, read_tree
from buffer_engine.exchange.trinity import import_trinity
from buffer_engine.exchange.trinity_payload import read_payload, read_safetensors
from buffer_engine.inspect import connect_store
from buffer_engine.store.local import LocalStore
from buffer_engine.store.opening import open_store

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("trinity-rft-*.db"))


def take(
    store: LocalStore,
    source: Path,
    *,
    table: str | None = "rollouts",
    on_invalid: OnInvalid = "refuse",
    run: str = "run",
) -> tuple[ImportReceipt, list[str]]:
    importer = Importer(store, on_invalid=on_invalid)
    return import_trinity(importer, source, table=table, run_id=run, taskset="trinity", partition="train")


def packed(fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> bytes:
    """An experience as Trinity 0.6 writes it."""
    metadata = pickle.dumps({"version": 1, "num_items": 1, "items": [fields]}, protocol=5)
    body = save({f"0:{name}": tensor for name, tensor in tensors.items()})
    return b"TRXP" + struct.pack("<BQQ", 1, len(metadata), len(body)) + metadata + body


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "eid": {"batch": 1, "task": 0, "run": 0, "step": 0, "suffix": "a"}, "reward": 1.0, "info": {}, "metrics": {},
        "prompt_length": 1, "prompt_text": "q", "response_text": "a", "messages": None,
    } | changes  # fmt: skip


TENSORS = {
    "tokens": np.array([5, 6, 7], dtype=np.int32),
    "logprobs": np.array([-0.5, -1.0], dtype=np.float32),
    "action_mask": np.array([True, True]),
}


def database(path: Path, *blobs: bytes | None) -> Path:
    """A database of Trinity 0.6's layout with these payloads."""
    with sqlite3.connect(path) as made:
        made.execute(
            "CREATE TABLE rollouts (id INTEGER PRIMARY KEY, timestamp DATETIME, task_id VARCHAR, run_id INTEGER, "
            "msg_id VARCHAR, model_version INTEGER, reward FLOAT, consumed INTEGER)"
        )
        made.execute("CREATE TABLE rollouts_blob (id INTEGER PRIMARY KEY, experience_bytes BLOB)")
        for number, blob in enumerate(blobs, start=1):
            made.execute("INSERT INTO rollouts (id, timestamp) VALUES (?, '2025-01-02 03:04:05')", (number,))
            made.execute("INSERT INTO rollouts_blob VALUES (?, ?)", (number, blob))
    made.close()
    return path


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_what_trinity_wrote_becomes_rollouts_scores_and_tasks(tmp_path: Path, file: Path) -> None:
    before = file.read_bytes()
    with open_store(tmp_path / "store") as store:
        receipt, notes = take(store, file)
        assert receipt.added == {"tasks": 2, "rollouts": 4, "scores": 7}
        assert notes == ["not imported: advantages of 2 rows"]
        assert store.verify() == []
        one, two, first, second = store.table("rollouts").to_pylist()
        assert one["token_ids"] == [10, 11, 12, 13, 14]
        assert two["token_ids"] == [10, 11, 12, 13, 15]
        assert one["loss_mask"] == [False, False, True, True, True]
        assert one["logprobs"] == [None, None, -0.5, -0.25, -1.0]
        assert one["token_versions"] == [{"version": 7, "length": 3}]
        assert (one["prompt_length"], one["model_version"], one["made_by"], one["stop_reason"]) == (
            2,
            7,
            "import",
            "imported",
        )
        assert [message["content"] for message in one["messages"]] == ["2 + 2?", "4 ü"]
        assert one["group_id"] == two["group_id"] != first["group_id"] == second["group_id"]
        assert [(row["group_size"], row["sample_index"], row["turn_index"]) for row in (one, two, first, second)] == [
            (2, 0, 0), (2, 1, 0), (1, 0, 0), (1, 0, 1),
        ]  # fmt: skip
        # the tool's token was given, not sampled: its log-probability is no number
        assert first["loss_mask"] == [False, False, True, False, True, True]
        assert first["logprobs"] == [None, None, -0.5, None, -0.75, -2.0]
        assert first["token_versions"] == [{"version": 8, "length": 3}]
        assert first["messages"][1]["tool_calls"] == '[{"id": "c", "function": {"name": "look", "arguments": "{}"}}]'
        assert first["messages"][2]["tool_call_id"] == "c"
        assert [row["truncated"] for row in (first, second)] == [False, True]
        assert '"reasoning_content": "it says sun"' in first["info_json"]
        assert '"note": "ä", "spread": 0.5' in one["info_json"]
        with connect_store(store) as inspection:
            rewards = inspection.query("SELECT reward FROM experiences ORDER BY sequence").column("reward").to_pylist()
            assert rewards == [0.0, 1.0, 0.5, None]
            metrics = inspection.query("SELECT value FROM scores WHERE name = 'metrics/speed' AND weight IS NULL")
            assert metrics.column("value").to_pylist() == [2.0, 2.0]
        assert [row["messages"][0]["content"] for row in store.table("tasks").to_pylist()] == ["2 + 2?", "weather?"]
        version = store.version()
        again, _ = take(store, file)
        assert (store.version(), again.added) == (version, {"tasks": 0, "rollouts": 0, "scores": 0})
    assert file.read_bytes() == before


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_a_preference_pair_is_a_group_of_two(tmp_path: Path, file: Path) -> None:
    with open_store(tmp_path / "store") as store:
        take(store, file, table="pairs")
        take(store, file, table="rollouts")  # rows of two tables do not get in each other's way
        chosen, rejected = store.table("rollouts").to_pylist()[:2]
        assert (chosen["token_ids"], rejected["token_ids"]) == ([1, 2, 3, 4, 5], [1, 2, 6])
        assert (chosen["loss_mask"], chosen["logprobs"]) == ([False, False, True, True, True], None)
        assert chosen["group_id"] == rejected["group_id"]
        assert [row["messages"][-1]["content"] for row in (chosen, rejected)] == ["hi", "go"]
        scores = {
            row["experience_id"]: row["value"]
            for row in store.table("scores").to_pylist()
            if row["name"] == "preference"
        }
        assert scores == {chosen["experience_id"]: 1.0, rejected["experience_id"]: 0.0}


def test_every_version_gives_the_same_rows(tmp_path: Path) -> None:
    tables = []
    for file in FIXTURES:
        with open_store(tmp_path / file.stem) as store:
            take(store, file)
            # ids, tokens and texts; times and random suffixes of ids are of their own
            tables.append(store.table("rollouts").drop_columns(["created_at", "info_json"]))
    assert len(tables) == 3
    assert tables[0].equals(tables[1])
    assert tables[1].equals(tables[2])


def test_a_table_has_to_be_named_when_there_are_several(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        with pytest.raises(UsageError, match=r"add --table pairs \| rollouts"):
            take(store, FIXTURES[0], table=None)
        with pytest.raises(UsageError, match="did you mean 'rollouts'"):
            take(store, FIXTURES[0], table="rolouts")
        (tmp_path / "text.db").write_text("no database at all, just text that is long enough to be looked at" * 20)
        with pytest.raises(UsageError, match="cannot be read as a SQLite database"):
            take(store, tmp_path / "text.db")


class _Evil:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mknod, (str(self._path),))


def test_a_pickle_that_runs_something_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    evil = _Evil(trap)
    file = database(
        tmp_path / "evil.db",
        packed(fields(), TENSORS),
        packed(fields(info={"x": evil}), TENSORS),
        pickle.dumps(evil),
        pickle.dumps(fields()),
        None,
    )
    with open_store(tmp_path / "store") as store:
        with pytest.raises(ExchangeError) as caught:
            take(store, file)
        text = str(caught.value)
        assert "has 4 bad rows, so nothing of it was stored" in text
        assert "rollouts id 2: the payload cannot be read safely: it makes an object of" in text
        assert "mknod" in text
        assert "rollouts id 3: the payload cannot be read safely: it holds " in text
        assert "rollouts id 4: the payload cannot be read safely: it holds dict, not an experience" in text
        assert "rollouts id 5: it has no payload" in text
        assert store.version() == 0
        receipt, _ = take(store, file, on_invalid="skip")
        assert (receipt.added["rollouts"], receipt.skipped) == (1, {"rollouts": 4})
        assert store.table("events").column("count").to_pylist() == [4]
    assert not trap.exists()
    trap.touch()
    with pytest.raises(FileExistsError):  # the trap does spring when it is unpickled
        pickle.loads(pickle.dumps(evil))


@pytest.mark.parametrize(
    ("changed", "tensors", "said"),
    [
        ({"prompt_length": 9}, {}, "prompt_length is 9 and there are 3 tokens"),
        ({"prompt_length": "1"}, {}, "prompt_length is '1'; it must be a whole number"),
        ({"reward": float("nan")}, {}, "reward is nan; it must be a finite number"),
        ({}, {"logprobs": np.array([-1.0], dtype=np.float32)}, r"logprobs has shape \(1,\) and the reply 2 tokens"),
        ({}, {"logprobs": np.array([-1.0, np.inf], dtype=np.float32)}, "logprobs of a sampled token are not finite"),
        ({}, {"action_mask": np.array([True])}, r"action_mask has shape \(1,\) and the reply 2 tokens"),
        ({}, {"tokens": np.array([2**40], dtype=np.int64)}, "do not fit int32"),
        ({}, {"tokens": np.array([[1]], dtype=np.int64)}, r"of shape \(1, 1\)"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {}, "parts other than text"),
        ({"messages": ["hi"]}, {}, r"messages\[0\] is no message with a role"),
    ],
)
def test_a_row_that_does_not_fit_is_named_with_the_reason(
    tmp_path: Path, changed: dict[str, Any], tensors: dict[str, Any], said: str
) -> None:
    file = database(tmp_path / "rows.db", packed(fields(**changed), TENSORS | tensors))
    with open_store(tmp_path / "store") as store:
        with pytest.raises(ExchangeError, match=f"rollouts id 1: .*{said}"):
            take(store, file)


def test_rows_without_batch_and_task_are_groups_of_their_own(tmp_path: Path) -> None:
    none = {"batch": "", "task": "", "run": 0, "step": 0, "suffix": "a"}
    file = database(tmp_path / "rows.db", *[packed(fields(eid=none), TENSORS)] * 2)
    with open_store(tmp_path / "store") as store:
        take(store, file)
        one, two = store.table("rollouts").to_pylist()
        assert one["group_id"] != two["group_id"]
        assert one["task_id"] == two["task_id"]


def test_rows_that_name_the_same_run_and_step_are_different_samples(tmp_path: Path) -> None:
    file = database(tmp_path / "rows.db", *[packed(fields(), TENSORS)] * 3)
    with open_store(tmp_path / "store") as store:
        take(store, file)
        rows = store.table("rollouts").to_pylist()
        assert [(row["sample_index"], row["turn_index"], row["group_size"]) for row in rows] == [
            (0, 0, 3),
            (1, 0, 3),
            (2, 0, 3),
        ]


def test_another_database_under_the_same_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    one = database(tmp_path / "one.db", packed(fields(), TENSORS))
    other = database(tmp_path / "other.db", packed(fields(response_text="b"), TENSORS))
    with open_store(tmp_path / "store") as store:
        take(store, one)
        with pytest.raises(ExchangeError, match="choose another --run"):
            take(store, other)
        take(store, other, run="second")
        assert store.table("rollouts").column("run_id").to_pylist() == ["run", "second"]


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(value=_values, protocol=st.integers(2, 5))
def test_plain_values_come_out_as_pickle_would_give_them(value: Any, protocol: int) -> None:
    if protocol < 3:  # bytes are a call there
        value = repr(value)
    assert plain(read_tree(pickle.dumps(value, protocol=protocol))) == value


def legacy_payload() -> bytes:
    """An experience that Trinity 0.5.1 pickled, tensors inside."""
    with contextlib.closing(sqlite3.connect(f"file:{FIXTURES[0]}?mode=ro", uri=True)) as rows:
        return rows.execute("SELECT experience_bytes FROM rollouts").fetchone()[0]


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=60), cut=st.integers(0, 60))
def test_any_bytes_are_read_or_refused_and_nothing_else(data: bytes, cut: int) -> None:
    for good in (packed(fields(), TENSORS), legacy_payload()):
        at = cut * len(good) // 61
        for candidate in (
            data,
            b"TRXP" + data,
            b"\x80\x05" + data,
            good[:at],
            good[:at] + data + good[at + len(data) :],
        ):
            with contextlib.suppress(UnreadablePickle):
                read_payload(candidate)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(
        ["eid", "reward", "info", "metrics", "prompt_length", "prompt_text", "response_text", "messages", "tools",
         "truncate_status", "chosen_messages", "multi_modal_input_keys"]
    ),
    value=_values | st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), _values), max_size=3),
    more=_values,
)  # fmt: skip
def test_any_plain_fields_become_a_row_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: Any, more: Any
) -> None:
    folder = tmp_path_factory.mktemp("fields")
    file = database(
        folder / "rows.db", packed(fields(**{name: value}), TENSORS), packed(fields(info={"x": more}), TENSORS)
    )
    with open_store(folder / "store", durability="process") as store:
        receipt, _ = take(store, file, on_invalid="skip")
        assert receipt.added["rollouts"] + receipt.skipped.get("rollouts", 0) == 2
        assert store.verify() == []


def test_small_bytes_that_unfold_to_much_are_refused() -> None:
    bomb: Any = ["x"]
    for _ in range(40):
        bomb = [bomb, bomb]
    with pytest.raises(UnreadablePickle, match="unfolds to more than"):
        plain(read_tree(pickle.dumps(bomb)))
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnreadablePickle, match="unfolds to more than"):
        plain(read_tree(pickle.dumps(loop)))
    with pytest.raises(UnreadablePickle, match="unfolds to more than"):
        plain(read_tree(pickle.dumps(["x" * 100_000] * 1000)))
    nested: tuple[Any, ...] = ()
    for _ in range(40):
        nested = (nested, nested)
    with pytest.raises(UnreadablePickle, match="a key that is neither text nor a number"):
        read_tree(b"\x80\x05}" + pickle.dumps(nested)[2:-1] + b"K\x01s.")
    with pytest.raises(UnreadablePickle, match="something that is no name"):
        read_payload(b"\x80\x05" + pickle.dumps(nested)[2:-1] + b")R.")


def test_names_and_calls_are_written_down_and_not_looked_up() -> None:
    assert read_tree(b"cno.such.module\nthing\n.") == Name("no.such.module", "thing")
    with pytest.raises(UnreadablePickle, match=r"refers to no.such.module.thing"):
        plain(read_tree(b"cno.such.module\nthing\n."))
    with pytest.raises(UnreadablePickle, match=r"makes an object of collections.OrderedDict"):
        plain(read_tree(pickle.dumps(OrderedDict(a=1))))
    stream = BytesIO(pickle.dumps(1) + pickle.dumps("two"))
    assert (read_tree(stream), read_tree(stream)) == (1, "two")


def test_tensors_are_those_that_the_library_wrote() -> None:
    made = {
        "a": np.arange(6, dtype=np.int64).reshape(2, 3), "b": np.array([], dtype=np.float32),
        "c": np.array([True, False]), "d": np.array([1.5, -2.0], dtype=np.float16),
    }  # fmt: skip
    found = read_safetensors(save(made))
    assert set(found) == set(made)
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert np.array_equal(found[name], tensor)


def test_bfloat16_keeps_its_value() -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save as save_torch

    [values] = read_safetensors(save_torch({"x": torch.tensor([1.5, -0.0078125], dtype=torch.bfloat16)})).values()
    assert values.tolist() == [1.5, -0.0078125]


def test_the_database_is_not_written(tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    shutil.copyfile(FIXTURES[0], copy)
    copy.chmod(0o444)
    before = sorted(path.name for path in tmp_path.iterdir())
    with open_store(tmp_path / "store") as store:
        take(store, copy)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "store") == before
