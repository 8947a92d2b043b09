"""Retention: payload leaves by a rule, everything else about a rollout stays, and nobody trains on the rest."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import cold_rows
import pytest
from backends import only_local, open_store
from store_rows import decisions, manifest, rollout, rollouts, score, table
from store_workload import fast_processes

from buffer_engine.errors import StoreBusyError, StoreError
from buffer_engine.schema import ROLLOUTS
from buffer_engine.store import LocalStore
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.erase import PAYLOAD, EraseRule, Erasure

pytestmark = pytest.mark.usefixtures("backend")

REJECTED = range(40)
KEPT = range(40, 80)
EVAL = range(80, 84)


def fill(folder: Path) -> None:
    """40 rows rejected (in 2025), 40 kept, 4 of evaluation; four a frame."""
    with open_store(folder, durability="process") as store:
        for start in range(0, 80, 4):
            ids = range(start, start + 4)
            store.append("rollouts", rollouts(ids))
            store.append("decisions", decisions(ids, "reject" if start < 40 else "keep"))
        store.append("rollouts", rollouts(EVAL, partition="eval"))
        store.append("scores", table("scores", [score(f"x{one}") for one in REJECTED]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[LocalStore]:
    with open_store(folder, durability="process") as opened:
        yield opened


def erase(
    store: LocalStore, *, force: bool = False, dry_run: bool = False, max_uses: int = 1, **rule: object
) -> Erasure:
    return store.erase(
        EraseRule(**rule),  # type: ignore[arg-type]
        reason="licence ended", author="ada", force=force, dry_run=dry_run, max_uses=max_uses, grace_seconds=0,
    )  # fmt: skip


def blank(number: int, **changes: object) -> dict[str, object]:
    return rollout(number, **changes) | {
        "messages": [], "token_ids": [], "loss_mask": [], "logprobs": [], "info_json": "{}",
    }  # fmt: skip


def ids(numbers: range) -> list[str]:
    return [f"x{number}" for number in numbers]


def test_payload_goes_and_identity_scores_and_a_record_stay(store: LocalStore) -> None:
    done = erase(store, rejected_seconds=86_400)
    assert (done.rows, done.tokens, done.left, dict(done.by_fate)) == (40, 160, 0, {"rejected": 40})
    assert store.fetch(ids(REJECTED)).to_pylist() == [blank(number) for number in REJECTED]
    assert store.fetch(ids(KEPT)) == rollouts(KEPT)
    assert store.narrow("scores", ["x3"]).to_pylist() == [score("x3")]
    record = store.table("erasures").to_pylist()[3]
    assert datetime.now(UTC) - record.pop("erased_at") < timedelta(minutes=1)
    assert record == {
        "experience_id": "x3", "run_id": "run", "rule": "rejected more than 1 d ago", "reason": "licence ended",
        "author": "ada", "tokens": 4,
    }  # fmt: skip
    assert store.verify() == []


def test_every_other_column_is_as_it_was() -> None:
    assert set(PAYLOAD) == {"messages", "token_ids", "loss_mask", "logprobs", "info_json"}
    assert set(PAYLOAD) <= set(ROLLOUTS.schema.names)


def test_log_probabilities_that_were_null_stay_null(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", durability="process") as store:
        store.append("rollouts", rollouts([1], logprobs=None, logprob_kind=None))
        erase(store, experience_ids=("x1",), force=True)
        assert store.fetch(["x1"]).to_pylist() == [blank(1, logprob_kind=None) | {"logprobs": None}]
        assert store.verify() == []


def test_the_bytes_leave_the_disk(tmp_path: Path) -> None:
    secret = "a secret that nobody may read any more"
    message = {"role": "user", "content": secret, "tool_calls": None, "tool_call_id": None, "media": None}
    with open_store(tmp_path / "store", durability="process") as store:
        store.append("rollouts", rollouts([1, 2], messages=[message]))
        store.append("rollouts", rollouts([3, 4]))
        store.append("decisions", decisions([1, 2], "reject"))

    def holding() -> list[Path]:
        return [
            path for path in (tmp_path / "store").rglob("*") if path.is_file() and secret.encode() in path.read_bytes()
        ]

    assert len(holding()) == 1
    with open_store(tmp_path / "store", durability="process") as store:
        assert erase(store, rejected_seconds=1).removed == 1
        assert holding() == []
        assert store.fetch(["x3", "x4"]) == rollouts([3, 4])


def parquet_files(store: LocalStore) -> set[str]:
    return {name for name in store._files.names() if name.startswith("rollouts/")}


def test_the_bytes_leave_a_parquet_file_too(store: LocalStore) -> None:
    store.compact(everything=True, grace_seconds=0)
    before = parquet_files(store)
    done = erase(store, experience_ids=("x7",))
    assert done.rows == 1
    after = parquet_files(store)
    assert len(before) == len(after) == 1
    assert before != after
    assert store.fetch(["x6", "x7", "x8"]).to_pylist() == [rollout(6), blank(7), rollout(8)]
    assert store.verify() == []


@only_local("an object is never appended to")
def test_a_file_that_a_process_still_writes_is_named_as_lingering(store: LocalStore, folder: Path) -> None:
    store.append("rollouts", rollouts([900, 901]))
    store.append("decisions", decisions([900, 901], "reject"))
    done = erase(store, rejected_seconds=1)
    (name,) = done.lingering
    assert (folder / "segments" / name).exists()
    assert store.fetch(["x900"]).to_pylist() == [blank(900)]
    store.close()
    with open_store(folder, durability="process") as later:
        later.compact(everything=True, grace_seconds=0)
        assert not (folder / "segments" / name).exists()
        assert later.verify() == []


def test_an_earlier_version_shows_the_payload_gone_too(store: LocalStore) -> None:
    early = 3
    assert store.table("rollouts", until=early).column("token_ids").to_pylist()[0] == [0, 2, 3, 4]
    erase(store, rejected_seconds=1)
    assert store.table("rollouts", until=early).column("token_ids").to_pylist()[0] == []
    assert store.table("erasures", until=early).num_rows == 0


def test_another_process_object_that_had_read_the_rows_sees_them_gone(store: LocalStore, folder: Path) -> None:
    with open_store(folder, read_only=True) as other:
        assert other.fetch(["x1"]).to_pylist() == [rollout(1)]
        erase(store, rejected_seconds=1)
        assert other.fetch(["x1"]).to_pylist() == [blank(1)]


def test_rows_that_training_waits_for_or_a_batch_holds_stay(store: LocalStore) -> None:
    reserved = store.reserve(ReadPolicy(rows=4), run_id="run", batch_id="b", model_version=0)
    assert reserved is not None
    done = erase(store, run_id="run")
    # the rejected ones and those of evaluation go
    assert (done.rows, done.left) == (44, 40)
    assert store.fetch(ids(KEPT)) == rollouts(KEPT)
    assert erase(store, experience_ids=("x40", "x79")).left == 2


def test_force_takes_waiting_rows_out_of_the_queue(store: LocalStore) -> None:
    done = erase(store, experience_ids=tuple(ids(KEPT)[:4]), force=True)
    assert (done.rows, dict(done.by_fate)) == (4, {"kept": 4})
    assert [row["verdict"] for row in store.narrow("decisions", ["x40"]).to_pylist()] == ["keep", "reject"]
    assert store.narrow("decisions", ["x40"]).to_pylist()[1]["operator"] == "retention"
    reserved = store.reserve(ReadPolicy(rows=40), run_id="run", batch_id="b", model_version=0)
    assert reserved is not None
    assert list(reserved.experience_ids) == ids(KEPT)[4:]
    assert store.verify() == []


@pytest.mark.parametrize(
    "policy",
    [ReadPolicy(rows=40, max_uses=3), ReadPolicy(type="uniform", rows=40, max_uses=3, seed=1)],
    ids=["fifo", "uniform"],
)
def test_an_erased_row_is_never_reserved_again(store: LocalStore, policy: ReadPolicy) -> None:
    first = store.reserve(policy, run_id="run", batch_id="b1", model_version=0)
    assert first is not None
    batch, rows = manifest("b1", 1, first.experience_ids)
    store.prepare_batch(first, step=1, batch=batch, rows=rows)
    store.commit_batch("b1", step=1)
    assert erase(store, trained_before_step=2, max_uses=3).left == 40  # two more uses are allowed
    gone = tuple(ids(KEPT)[:6])
    assert erase(store, experience_ids=gone).rows == 6
    again = store.reserve(policy, run_id="run", batch_id="b2", model_version=1)
    assert again is not None
    assert sorted(again.experience_ids) == sorted(ids(KEPT)[6:])
    # not even when somebody says keep once more
    store.append("decisions", decisions([40, 41], "release", pass_id="p2"))
    store.append("decisions", decisions([40, 41], "keep", pass_id="p3"))
    store.release("b2")
    third = store.reserve(policy, run_id="run", batch_id="b3", model_version=1)
    assert third is not None
    assert set(third.experience_ids) & set(gone) == set()
    assert store.verify() == []


def test_trained_rows_go_by_the_step_that_trained_them_last(store: LocalStore) -> None:
    for step in (1, 2, 3):
        reserved = store.reserve(ReadPolicy(rows=4), run_id="run", batch_id=f"b{step}", model_version=step - 1)
        assert reserved is not None
        batch, rows = manifest(f"b{step}", step, reserved.experience_ids)
        store.prepare_batch(reserved, step=step, batch=batch, rows=rows)
        store.commit_batch(f"b{step}", step=step)
    done = erase(store, trained_before_step=3)
    assert (done.rows, dict(done.by_fate)) == (8, {"trained": 8})
    assert store.table("erasures").column("experience_id").to_pylist() == ids(range(40, 48))
    assert store.narrow("decisions", ["x40"]).num_rows == 1  # what it was trained for is not called rejected
    assert store.verify() == []


def test_rejected_rows_go_by_the_age_of_their_verdict(store: LocalStore) -> None:
    young = table("decisions", [
        {**decisions([one], "reject").to_pylist()[0], "pass_id": "p9", "decided_at": datetime.now(UTC)}
        for one in range(10)
    ])  # fmt: skip
    store.append("decisions", young)
    assert erase(store, rejected_seconds=3600, dry_run=True).rows == 30
    assert erase(store, rejected_seconds=0, dry_run=True).rows == 40
    # by versions: the ten were judged at the newest
    assert erase(store, rejected_versions=1, dry_run=True).rows == 30
    assert erase(store, rejected_versions=0, dry_run=True).rows == 40


def test_a_dry_run_changes_nothing(store: LocalStore) -> None:
    version, before = store.version(), store.table("rollouts")
    said = erase(store, rejected_seconds=1, dry_run=True)
    assert (said.rows, said.tokens, said.files) == (40, 160, ())
    assert said.bytes > 0
    assert store.version() == version
    assert store.table("rollouts") == before
    done = erase(store, rejected_seconds=1)
    assert (done.rows, done.tokens, done.bytes) == (said.rows, said.tokens, said.bytes)


def test_erasing_twice_is_erasing_once(store: LocalStore) -> None:
    erase(store, rejected_seconds=1)
    version = store.version()
    assert erase(store, rejected_seconds=1).rows == 0
    assert store.version() == version


def test_the_original_row_can_be_appended_again_and_does_not_come_back(store: LocalStore) -> None:
    erase(store, rejected_seconds=1)
    receipt = store.append("rollouts", rollouts(REJECTED))
    assert receipt.unchanged == {"rollouts": 40}
    assert store.fetch(["x1"]).to_pylist() == [blank(1)]


def test_a_rule_chooses_rows_in_exactly_one_way() -> None:
    with pytest.raises(StoreError, match="names no rows"):
        EraseRule()
    with pytest.raises(StoreError, match="rejected_seconds and trained_before_step are given"):
        EraseRule(rejected_seconds=1, trained_before_step=3)
    assert EraseRule(trained_before_step=3, run_id="a").text == "last trained before step 3, run a"


def test_an_unknown_id_and_an_empty_reason_are_refused(store: LocalStore) -> None:
    with pytest.raises(StoreError, match="1 of 2 named rows are not stored, the first is 'nobody'"):
        erase(store, experience_ids=("x1", "nobody"))
    with pytest.raises(StoreError, match="an erasure needs a reason"):
        store.erase(EraseRule(run_id="run"), reason=" ", author="ada")
    assert store.table("erasures").num_rows == 0


def test_a_row_reserved_while_its_file_is_written_is_not_erased(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def released() -> None:  # between choosing the rows and the transaction, somebody gives one back to training
        store.append("decisions", decisions([5], "release", pass_id="p2"))

    from buffer_engine.store import compact

    write = compact.Compactor.write

    def slow(self: compact.Compactor, *arguments: object, **named: object) -> compact.Made:
        made = write(self, *arguments, **named)  # type: ignore[arg-type]
        released()
        return made

    monkeypatch.setattr(compact.Compactor, "write", slow)
    with pytest.raises(StoreBusyError, match="'x5' was wanted by training meanwhile"):
        erase(store, rejected_seconds=1)
    assert store.table("erasures").num_rows == 0
    assert store.fetch(["x5"]).to_pylist() == [rollout(5)]
    monkeypatch.undo()
    done = erase(store, rejected_seconds=1)
    assert done.rows == 39
    assert store.verify() == []


@only_local("copies the store; see test_store_shared_upkeep.py")
def test_erasure_killed_anywhere_is_done_or_not_done(folder: Path, tmp_path: Path) -> None:
    context = fast_processes()
    outcomes = set()
    for calls in (50, 400, 700, 900, 1100, 1200, 1300, 1400, 1500, 1600, 1700, 1800, 2000, 100_000_000):
        place = tmp_path / "copy"
        shutil.copytree(folder, place)
        process = context.Process(target=cold_rows.erase_until_killed, args=(str(place), calls))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        with open_store(place, durability="process") as store:
            recorded = set(store.table("erasures").column("experience_id").to_pylist())
            empty = {row["experience_id"] for row in store.table("rollouts").to_pylist() if not row["token_ids"]}
            assert recorded == empty
            assert recorded in (set(), set(ids(REJECTED)))
            outcomes.add(len(recorded))
            assert store.verify() == []
            erase(store, rejected_seconds=1)
            assert store.table("erasures").num_rows == 40
            assert store.verify() == []
        shutil.rmtree(place)
    assert outcomes == {0, 40}
