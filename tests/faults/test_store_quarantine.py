"""A damaged frame is set aside: nothing stops, nothing else is hidden, and a repaired file is taken back."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from backends import flip_bit, frame_at, only_local, open_store
from store_rows import decisions, manifest, model, rollouts, score, table
from typer.testing import CliRunner

from buffer_engine.errors import CorruptSegmentError, DamagedRowsWarning
from buffer_engine.inspect import connect_store
from buffer_engine.schema import QUARANTINE
from buffer_engine.store import LocalStore
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.damage import past_damage
from pipelines.cli.main import app

pytestmark = pytest.mark.usefixtures("backend")

GROUPS = 4
"""Groups of two rows; each group is one frame of rollouts and one of decisions."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with open_store(tmp_path / "s", durability="process") as store:
        for group in range(GROUPS):
            numbers = [2 * group, 2 * group + 1]
            store.append_all({"rollouts": rollouts(numbers), "decisions": decisions(numbers)})
            store.append("scores", table("scores", [score(f"x{number}", float(number)) for number in numbers]))
    return tmp_path / "s"


@pytest.fixture
def store(folder: Path) -> Iterator[LocalStore]:
    with open_store(folder, durability="process") as opened:
        yield opened


def flip(folder: Path, name: str, number: int) -> None:
    """Flip one bit in the middle of the `number`-th frame of a table; a second call undoes it."""
    _, segment, offset = frame_at(folder, name, number)
    flip_bit(folder, segment, offset + 200)


def statuses(store: LocalStore) -> dict[str, str]:
    state = store.rollout_state()
    return dict(
        zip(state.column("experience_id").to_pylist(), state.column("status").to_pylist(), strict=True)
    )  # fmt: skip


def ids(store: LocalStore) -> list[str]:
    return store.table("rollouts", columns=["experience_id"]).column(0).to_pylist()


def test_reading_a_whole_table_goes_on_without_the_damaged_frame_and_says_so(folder: Path, store: LocalStore) -> None:
    flip(folder, "rollouts", 1)
    with pytest.warns(DamagedRowsWarning, match=r"2 rows of rollouts are left out.*bytes have changed"):
        found = ids(store)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert found == ids(store) == ["x0", "x1", "x4", "x5", "x6", "x7"]
    (frame,) = store.info().quarantined
    _, segment, offset = frame_at(folder, "rollouts", 1)
    assert (frame.table, frame.segment, frame.offset, frame.rows) == ("rollouts", segment, offset, 2)
    assert statuses(store) == {f"x{n}": "rejected" if n in (2, 3) else "kept" for n in range(8)}
    late = [row for row in store.narrow("decisions", ["x2", "x3"]).to_pylist() if row["operator"] == "store"]
    assert [(row["experience_id"], row["verdict"], row["reason"], row["detail"]) for row in late] == [
        ("x2", "reject", "damaged", "was kept"),
        ("x3", "reject", "damaged", "was kept"),
    ]
    (event,) = store.table("events").to_pylist()
    assert (event["kind"], event["count"], event["run_id"]) == ("damaged_frame", 2, "run")
    assert f"rollouts, segments/{frame.segment}, offset {offset}, 2 rows" in event["detail"]
    assert [(one.kind, "in quarantine" in one.message) for one in store.verify()] == [("checksum", True)]


@pytest.mark.filterwarnings("ignore::buffer_engine.errors.DamagedRowsWarning")
def test_other_processes_go_without_the_frame_and_read_nothing_of_it(folder: Path, store: LocalStore) -> None:
    flip(folder, "rollouts", 0)
    assert len(ids(store)) == 6
    flip(folder, "rollouts", 0)  # sound again, but nobody has said so
    with open_store(folder, read_only=True) as other:
        with pytest.warns(DamagedRowsWarning, match="2 rows of rollouts"):
            assert len(ids(other)) == 6
        with pytest.raises(CorruptSegmentError, match=r"rollout 'x1' cannot be read.*store recheck"):
            other.fetch(["x2", "x1"])
        assert other.fetch(["x2"]).num_rows == 1


def test_a_store_opened_for_reading_skips_and_warns_and_writes_nothing(folder: Path) -> None:
    flip(folder, "rollouts", 1)
    with open_store(folder, read_only=True) as store:
        before = store.version()
        with pytest.warns(DamagedRowsWarning, match="opened read-only"):
            assert len(ids(store)) == 6
        with pytest.raises(CorruptSegmentError, match="'x2' and 1 more"):
            store.fetch(["x2", "x0", "x3"])
        assert (store.version(), store.info().quarantined) == (before, ())


@pytest.mark.parametrize(
    ("incomplete", "taken"), [("wait", ["x4", "x5"]), ("use", ["x1", "x4", "x5"]), ("drop", ["x4", "x5"])]
)
@pytest.mark.parametrize("kind", ["fifo", "uniform"])
@pytest.mark.filterwarnings("ignore::buffer_engine.errors.DamagedRowsWarning")
def test_a_reservation_takes_no_damaged_row_and_a_group_that_misses_one_is_incomplete(
    tmp_path: Path, incomplete: str, taken: list[str], kind: str
) -> None:
    with open_store(tmp_path / "t", durability="process") as store:
        for number in (0, 1, 4, 5):  # every row in a frame of its own
            store.append_all({"rollouts": rollouts([number]), "decisions": decisions([number])})
        flip(tmp_path / "t", "rollouts", 0)
        policy = ReadPolicy.model_validate({"type": kind, "rows": 4, "incomplete": incomplete, "seed": 1})
        held = store.reserve(policy, run_id="run", batch_id="b1", model_version=0)
        assert held is not None
        assert sorted(held.experience_ids) == taken
        sibling = "rejected" if incomplete == "drop" else "kept"
        assert (statuses(store)["x0"], statuses(store)["x1"]) == ("rejected", sibling)
        assert [one.kind for one in store.verify()] == ["checksum"]


@pytest.mark.filterwarnings("ignore::buffer_engine.errors.DamagedRowsWarning")
def test_a_policy_goes_on_without_damaged_scores_and_reads_them_once_they_are_repaired(
    folder: Path, store: LocalStore
) -> None:
    flip(folder, "scores", 3)
    given = {"type": "prioritized", "by": "score:answer", "rows": 2, "exponent": 8, "unseen": 0.0, "seed": 3}
    policy = ReadPolicy.model_validate(given)
    held = store.reserve(policy, run_id="run", batch_id="b1", model_version=0)
    assert held is not None
    assert [one.table for one in store.info().quarantined] == ["scores"]
    assert set(held.experience_ids) == {"x4", "x5"}  # without scores of x6 and x7 these have the highest
    store.release("b1")
    flip(folder, "scores", 3)
    assert store.recheck()[1] == [frame_at(folder, "scores", 3)[0]]
    held = store.reserve(policy, run_id="run", batch_id="b2", model_version=0)
    assert held is not None
    assert set(held.experience_ids) == {"x6", "x7"}


@pytest.mark.filterwarnings("ignore::buffer_engine.errors.DamagedRowsWarning")
def test_narrow_rows_that_are_sound_are_found_and_state_in_the_catalog_stays(folder: Path, store: LocalStore) -> None:
    flip(folder, "decisions", 2)
    flip(folder, "scores", 0)
    assert store.narrow("scores", ["x1", "x4"]).column("experience_id").to_pylist() == ["x4"]
    assert store.narrow("decisions", ["x4", "x6"]).column("experience_id").to_pylist() == ["x6"]
    assert statuses(store) == {f"x{n}": "kept" for n in range(8)}
    assert {one.table for one in store.info().quarantined} == {"scores", "decisions"}


@pytest.mark.filterwarnings("ignore::buffer_engine.errors.DamagedRowsWarning")
def test_a_prepared_batch_that_needs_a_damaged_row_says_which(folder: Path, store: LocalStore) -> None:
    held = store.reserve(ReadPolicy.model_validate({"rows": 4}), run_id="run", batch_id="b1", model_version=0)
    assert held is not None
    batch, rows = manifest("b1", 1, held.experience_ids)
    store.prepare_batch(held, step=1, batch=batch, rows=rows)
    flip(folder, "rollouts", 1)
    with open_store(folder) as later:
        with pytest.raises(CorruptSegmentError, match=r"rollout 'x2' and 1 more cannot be read.*restore this file"):
            later.fetch(held.experience_ids)
        # what was trained before the damage counts all the same
        later.commit_batch("b1", step=1, model=model(1))
        assert [one.kind for one in later.verify()] == ["checksum"]
        state = {row["experience_id"]: (row["status"], row["uses"]) for row in later.rollout_state().to_pylist()}
        assert (state["x0"], state["x2"], state["x4"]) == (("kept", 1), ("rejected", 1), ("kept", 0))


@only_local("a file is put back over another")
@pytest.mark.filterwarnings("ignore::buffer_engine.errors.DamagedRowsWarning")
def test_a_repaired_file_is_taken_back_with_the_verdicts_that_its_rows_had(folder: Path, store: LocalStore) -> None:
    store.append("decisions", decisions([3], "hold", pass_id="p2"))
    store.append("rollouts", rollouts([8, 9]))  # no verdict yet
    path = folder / "segments" / frame_at(folder, "rollouts", 1)[1]
    shutil.copy2(path, folder.parent / "copy")
    flip(folder, "rollouts", 1)
    flip(folder, "rollouts", 4)
    assert len(ids(store)) == 6
    store.append("decisions", decisions([8], "reject", pass_id="p3"))  # somebody decides about a damaged row
    assert [statuses(store)[one] for one in ("x2", "x3", "x8", "x9")] == ["rejected"] * 4
    os.replace(folder.parent / "copy", path)
    flip(folder, "rollouts", 4)
    assert ids(store) == ["x0", "x1", "x4", "x5", "x6", "x7"]
    assert CliRunner().invoke(app, ["store", "recheck", str(folder)]).exit_code == 0
    assert ids(store) == [f"x{number}" for number in range(10)]
    assert [statuses(store)[one] for one in ("x2", "x3", "x8", "x9")] == ["kept", "held", "rejected", "new"]
    assert store.verify() == []
    assert [row["kind"] for row in store.table("events").to_pylist()] == ["damaged_frame"] * 2 + ["frame_restored"] * 2
    assert store.recheck() == ([], [])


@pytest.mark.filterwarnings("ignore::buffer_engine.errors.DamagedRowsWarning")
def test_the_commands_and_the_view_name_what_is_in_quarantine(folder: Path) -> None:
    flip(folder, "rollouts", 1)
    _, segment, offset = frame_at(folder, "rollouts", 1)
    runner = CliRunner()
    done = runner.invoke(app, ["store", "recheck", str(folder)])
    assert done.exit_code == 1
    assert "1 put into quarantine, 0 taken back, 1 in quarantine now" in done.output
    assert isinstance(done.exception, Exception)
    assert "2 rows cannot be read" in str(done.exception)
    assert segment.rpartition("/")[2] in runner.invoke(app, ["store", "info", str(folder)]).output.replace("\n", "")
    with connect_store(folder) as inspection:
        (row,) = inspection.rows("SELECT * FROM quarantine")
        assert list(row) == QUARANTINE.names
        assert (row["table_name"], row["offset"], row["rows"]) == ("rollouts", offset, 2)
        assert inspection.rows("SELECT count(*) AS n FROM rollouts") == [{"n": 6}]
        assert inspection.rows("SELECT * FROM conservation WHERE NOT balanced") == []


def test_who_looks_rows_up_and_reads_them_gets_past_the_damage(folder: Path, store: LocalStore) -> None:
    flip(folder, "rollouts", 0)
    flip(folder, "rollouts", 2)

    def read() -> list[str]:
        kept = store.rollout_state(status="kept").column("experience_id").to_pylist()
        return store.fetch(kept, columns=["experience_id"]).column(0).to_pylist()

    with pytest.warns(DamagedRowsWarning):
        assert past_damage(read) == ["x2", "x3", "x6", "x7"]
    with pytest.raises(CorruptSegmentError, match="'x4'"):
        past_damage(lambda: store.fetch(["x4"]))


@pytest.mark.filterwarnings("ignore::buffer_engine.errors.DamagedRowsWarning")
def test_other_content_for_a_damaged_row_is_refused_because_nothing_can_be_compared(
    folder: Path, store: LocalStore
) -> None:
    flip(folder, "rollouts", 0)
    assert store.append("rollouts", rollouts([0])).unchanged == {"rollouts": 1}  # the hash says that it is the same
    with pytest.raises(CorruptSegmentError, match="bytes have changed"):
        store.append("rollouts", rollouts([0], stop_reason="length"))
    assert [one.table for one in store.info().quarantined] == ["rollouts"]
