"""Rows of files into a store: exact, once, and every bad row named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exchange_rows import make_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_rows import rollout, rollouts, score, table, task

from buffer_engine.errors import ExchangeError, UsageError
from buffer_engine.exchange.export import ExportFormat, export
from buffer_engine.exchange.incoming import Importer, ImportReceipt, OnInvalid
from buffer_engine.exchange.relations import Extraction, Selection, every_table
from buffer_engine.exchange.sources import find_files
from buffer_engine.schema import TABLES
from buffer_engine.store.local import LocalStore
from buffer_engine.store.opening import open_store

ALONE = [name for name in TABLES if name not in ("batches", "batch_rows", "token_stats", "erasures")]


def take(
    store: LocalStore,
    source: Path,
    *,
    tables: tuple[str, ...] = (),
    on_invalid: OnInvalid = "refuse",
    dry_run: bool = False,
) -> ImportReceipt:
    files = find_files(source, format=None, tables=tables)
    root = source if source.is_dir() else source.parent
    return Importer(store, on_invalid=on_invalid, dry_run=dry_run).take_files(files, root=root)


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def plain_score(experience_id: str, **changes: Any) -> dict[str, Any]:
    row = score(experience_id, **changes)
    return row | {"scored_at": row["scored_at"].isoformat()}


@pytest.mark.parametrize("format", ["parquet", "jsonl", "hf"])
def test_what_was_exported_comes_back_as_it_was(tmp_path: Path, format: ExportFormat) -> None:
    make_store(tmp_path / "store")
    with open_store(tmp_path / "store") as store, Extraction(store) as extraction:
        export(extraction, tmp_path / "out", every_table(), format=format)
        with open_store(tmp_path / "again") as again:
            first = take(again, tmp_path / "out", tables=tuple(ALONE))
            for name in ALONE:
                one, other = store.table(name), again.table(name)
                if format == "hf":  # train and eval rows are files of their own
                    keys = [(key, "ascending") for key in TABLES[name].key]
                    one, other = (rows.sort_by(keys) if keys else rows for rows in (one, other))
                if name == "media":
                    one, other = (rows.drop_columns(["created_at"]) for rows in (one, other))
                assert one.equals(other), name
                assert first.added.get(name, 0) == one.num_rows
            [media_id] = again.table("media").column("media_id").to_pylist()
            assert again.media(media_id) == b"picture"
            version = again.version()
            second = take(again, tmp_path / "out", tables=tuple(ALONE))
            assert again.version() == version
            assert sum(second.added.values()) == 0
            assert second.unchanged == dict(first.added.items())
            assert again.rollout_state().column("status").to_pylist().count("kept") == 4


def test_rows_without_a_key_are_taken_once_a_file(tmp_path: Path) -> None:
    metric = {"run_id": "run", "step": 1, "name": "loss", "value": 0.5, "recorded_at": "2025-01-02T03:04:05+00:00"}
    file = write_lines(tmp_path / "metrics.jsonl", *[metric] * 3)
    with open_store(tmp_path / "store") as store:
        assert take(store, file).added == {"metrics": 3}
        assert take(store, file).unchanged == {"metrics": 3}
        assert store.table("metrics").num_rows == 3


def test_bad_lines_are_all_named_and_nothing_is_stored(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "scores.jsonl",
        plain_score("x0"),
        '{"experience_id": "x1", "value": NaN}',
        "not json",
        [1],
        plain_score("x0", name="b", valeu=1),
        plain_score("x0", name="c", version="2"),
        plain_score("x0", name="d", version=2**31),
        plain_score("x0", name="e") | {"scored_at": "2025-01-02 03:04"},
        plain_score("x0", name="f") | {"author": None},
        plain_score("x0", name="g") | {"value": True},
        plain_score("x0", name="h", value=10**400),
        json.dumps(plain_score("x0", name="i", value=77)).replace("77", "1e999"),
        plain_score("x0", name="ok"),
    )
    with open_store(tmp_path / "store") as store:
        store.append("rollouts", rollouts([0]))
        with pytest.raises(ExchangeError) as caught:
            take(store, file)
        text = str(caught.value)
        assert "has 11 bad rows, so nothing of it was stored" in text
        for line, said in (
            (2, "NaN is no number of JSON"),
            (3, "not JSON"),
            (4, "a JSON list"),
            (5, "unknown column 'valeu': did you mean 'value'"),
            (6, "experience_id='x0', name='c', version='2': version is '2'; it must be a whole number"),
            (7, "version is 2147483648, which does not fit int32"),
            (8, "scored_at is '2025-01-02 03:04', which has no time zone"),
            (9, "author is null"),
            (10, "value is True; it must be a number"),
            (11, "int too large to convert to float"),
        ):
            assert any(f"scores.jsonl:{line}:" in row and said in row for row in text.splitlines()), (line, text)
        assert store.table("scores").num_rows == 0


def test_bad_rows_can_be_skipped_and_are_counted_once(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "scores.jsonl", plain_score("x0"), "oops", plain_score("nobody"), plain_score("x1", value=0.5)
    )
    with open_store(tmp_path / "store") as store:
        store.append("rollouts", rollouts([0, 1]))
        for repeat in range(2):
            receipt = take(store, file, on_invalid="skip")
            assert receipt.skipped == {"scores": 2}
            assert (receipt.added, receipt.unchanged) == (
                ({"scores": 2}, {"scores": 0}),
                ({"scores": 0}, {"scores": 2}),
            )[repeat]
            assert any("experience_id='nobody' is not a stored rollout" in reason for reason in receipt.reasons)
        [event] = store.table("events").to_pylist()
        assert (event["kind"], event["count"], event["run_id"]) == ("import_skipped", 2, "import")
        assert "scores from scores.jsonl: not JSON" in event["detail"]


def test_a_key_with_other_content_is_refused_with_its_line(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "scores.jsonl", plain_score("x0", name="b"), plain_score("x0", value=0.0))
    with open_store(tmp_path / "store") as store:
        store.append_all({"rollouts": rollouts([0]), "scores": table("scores", [score("x0", 1.0)])})
        with pytest.raises(
            ExchangeError, match=r"scores.jsonl:2: scores: .* is stored already with other content: value"
        ):
            take(store, file)
        receipt = take(store, file, on_invalid="skip")
        assert receipt.skipped == {"scores": 1}
        assert receipt.unchanged == {"scores": 1}  # stored before the line at fault was met


def test_parquet_rows_are_told_apart_by_number(tmp_path: Path) -> None:
    rows = [rollout(0), rollout(1, loss_mask=[True]), rollout(2, task_id=None)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rollouts.parquet")
    with open_store(tmp_path / "store") as store:
        with pytest.raises(ExchangeError) as caught:
            take(store, tmp_path / "rollouts.parquet")
        assert "rollouts.parquet row 1: rollouts: experience_id='x1': loss_mask has length 1" in str(caught.value)
        assert "rollouts.parquet row 2: rollouts: experience_id='x2': task_id is null" in str(caught.value)
        assert take(store, tmp_path / "rollouts.parquet", on_invalid="skip").added == {"rollouts": 1}


def test_wrong_columns_of_a_file_are_told_of_once(tmp_path: Path) -> None:
    pq.write_table(table("scores", [score("x0")]).rename_columns(
        ["experience_id", "name", "valeu", "weight", "source", "author", "version", "run_id", "scored_at", "comment"]
    ), tmp_path / "scores.parquet")  # fmt: skip
    with open_store(tmp_path / "store") as store:
        with pytest.raises(
            ExchangeError, match=r"scores.parquet: scores: unknown column 'valeu': did you mean 'value'"
        ):
            take(store, tmp_path / "scores.parquet")


def test_a_dry_run_checks_and_stores_nothing(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "scores.jsonl", plain_score("x0"), "oops")
    with open_store(tmp_path / "store") as store:
        with pytest.raises(ExchangeError, match="1 bad row"):
            take(store, file, dry_run=True)
        receipt = take(store, file, dry_run=True, on_invalid="skip")
        assert (receipt.added, receipt.skipped) == ({"scores": 1}, {"scores": 1})
        assert store.version() == 0


def test_the_table_is_known_by_name_columns_or_being_told(tmp_path: Path) -> None:
    row = task("t") | {"created_at": "2025-01-02T03:04:05+00:00"}
    write_lines(tmp_path / "anything.jsonl", row)
    assert find_files(tmp_path / "anything.jsonl", format=None, tables=())[0].table == "tasks"
    write_lines(tmp_path / "few.jsonl", {"run_id": "r", "step": 1})
    with pytest.raises(UsageError, match="nothing says which table"):
        find_files(tmp_path / "few.jsonl", format=None, tables=())
    assert find_files(tmp_path / "few.jsonl", format=None, tables=("metrics",))[0].table == "metrics"
    write_lines(tmp_path / "chat.jsonl", {"messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(UsageError, match="these are dialogues"):
        find_files(tmp_path / "chat.jsonl", format=None, tables=())


def test_tables_that_mean_nothing_alone_are_refused(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    with open_store(tmp_path / "store") as store, Extraction(store) as extraction:
        export(extraction, tmp_path / "out", [Selection("batches", "table")], format="jsonl")
    with open_store(tmp_path / "again") as store:
        with pytest.raises(UsageError, match="table batches cannot be imported alone"):
            take(store, tmp_path / "out")


def test_an_attachment_without_its_bytes_is_a_bad_row(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    with open_store(tmp_path / "store") as store, Extraction(store) as extraction:
        export(extraction, tmp_path / "out", [Selection("rollouts", "table")], format="parquet")
        [media_id] = store.table("media").column("media_id").to_pylist()
    path = tmp_path / "out" / "media" / media_id[:2] / media_id
    path.write_bytes(b"other")
    with open_store(tmp_path / "again") as store:
        with pytest.raises(ExchangeError, match="holds other bytes"):
            take(store, tmp_path / "out")
        path.unlink()
        with pytest.raises(ExchangeError, match="there is no file media/"):
            take(store, tmp_path / "out")
        receipt = take(store, tmp_path / "out", on_invalid="skip")
        assert receipt.skipped == {"media": 1, "rollouts": 1}
        assert receipt.added["rollouts"] == 6


def test_a_media_id_cannot_reach_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "in").mkdir()
    row = {"media_id": "../../secret", "media_type": "text/plain", "bytes": 4, "created_at": "2025-01-02T03:04:05Z"}
    write_lines(tmp_path / "in" / "media.jsonl", row)
    with open_store(tmp_path / "store") as store:
        with pytest.raises(ExchangeError, match="not the sha256 of any bytes"):
            take(store, tmp_path / "in")
        assert not (tmp_path / "store" / "media").exists()


def test_a_dataset_card_cannot_reach_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "metrics.jsonl", {})
    for data_files, said in (
        ("../metrics.jsonl", "no such file below"),
        ("[{split: train}]", "is not a list of config_name"),
    ):
        (tmp_path / "in" / "README.md").write_text(
            f"---\nconfigs:\n- config_name: metrics\n  data_files: {data_files}\n---\n"
        )
        with pytest.raises(ExchangeError, match=said):
            find_files(tmp_path / "in", format="hf", tables=())


def test_a_dataset_saved_by_the_hugging_face_library_comes_in(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
    make_store(tmp_path / "store")
    with open_store(tmp_path / "store") as store, Extraction(store) as extraction:
        export(extraction, tmp_path / "out", [Selection("tasks", "table"), Selection("scores", "table")], format="hf")
        loaded = datasets.load_dataset(str(tmp_path / "out"), "tasks", cache_dir=str(tmp_path / "cache"))
        loaded.save_to_disk(str(tmp_path / "saved"))
        with open_store(tmp_path / "again") as again:
            assert take(again, tmp_path / "saved", tables=("tasks",)).added == {"tasks": 3}
            assert again.table("tasks").sort_by("task_id").equals(store.table("tasks").sort_by("task_id"))


_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
_message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant"]), "content": st.none() | _text, "tool_calls": st.none() | _text,
        "tool_call_id": st.none() | _text, "media": st.none() | st.lists(_text, max_size=2),
    }
)  # fmt: skip


@st.composite
def _rollouts(draw: st.DrawFn) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 4))):
        length = draw(st.integers(0, 5))
        rows.append(
            rollout(
                number,
                messages=draw(st.lists(_message, max_size=3)),
                token_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)),
                loss_mask=draw(st.lists(st.booleans(), min_size=length, max_size=length)),
                logprobs=draw(st.none() | st.lists(st.none() | _float32, min_size=length, max_size=length)),
                info_json=draw(_text),
                error=draw(st.none() | _text),
                created_at=draw(st.datetimes(timezones=st.just(__import__("datetime").UTC))),
            )
        )
    return rows


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=_rollouts(), format=st.sampled_from(["parquet", "jsonl"]))
def test_any_rollouts_survive_the_way_out_and_in(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], format: ExportFormat
) -> None:
    folder = tmp_path_factory.mktemp("trip")
    with (
        open_store(folder / "a", durability="process") as store,
        open_store(folder / "b", durability="process") as again,
    ):
        store.append("rollouts", table("rollouts", rows))
        with Extraction(store) as extraction:
            export(extraction, folder / f"rollouts.{format}", [Selection("rollouts", "table")], format=format)
        take(again, folder / f"rollouts.{format}")
        assert again.table("rollouts").equals(store.table("rollouts"))


def test_a_large_file_is_taken_in_parts(tmp_path: Path) -> None:
    rows = table("rollouts", [rollout(number, token_ids=[1] * 4) for number in range(3000)])
    pq.write_table(rows, tmp_path / "rollouts.parquet")
    seen: list[int] = []
    with open_store(tmp_path / "store", durability="process") as store:
        files = find_files(tmp_path / "rollouts.parquet", format="parquet", tables=())
        Importer(store, advance=seen.append).take_files(files, root=tmp_path)
        assert store.table("rollouts").num_rows == sum(seen) == 3000
        assert max(seen) <= 1024
        assert np.all(np.diff(store.rollout_state().column("sequence").to_numpy()) == 1)
