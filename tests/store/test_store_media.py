"""Attachments: stored once, durable before the reference, refused when unknown, checked by verify."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from backends import only_local, open_store
from store_rows import child_environment, rollout, table, task

from buffer_engine.errors import CorruptSegmentError, KeyConflictError, SchemaError, StoreError
from buffer_engine.inspect import connect_store
from buffer_engine.store.base import Finding

pytestmark = pytest.mark.usefixtures("backend")

PICTURE = b"\x89PNG not really a picture"
PICTURE_ID = hashlib.sha256(PICTURE).hexdigest()


def message(*media: str) -> dict[str, object]:
    return {"role": "user", "content": "look", "tool_calls": None, "tool_call_id": None, "media": list(media)}


def test_the_same_bytes_are_kept_once_under_their_hash(tmp_path: Path) -> None:
    picture = tmp_path / "cat.png"
    picture.write_bytes(PICTURE)
    with open_store(tmp_path / "store") as store:
        assert store.put_media(picture, "image/png") == PICTURE_ID
        assert store.put_media(PICTURE, "image/png", name="other.png") == PICTURE_ID
        assert store._parts.media.ids() == [PICTURE_ID]
        assert store.media(PICTURE_ID) == store.media("sha256:" + PICTURE_ID) == PICTURE
        [row] = store.table("media").to_pylist()
        assert (row["media_id"], row["media_type"], row["bytes"], row["name"]) == (
            PICTURE_ID, "image/png", len(PICTURE), "cat.png",
        )  # fmt: skip
        assert store.verify() == []


def test_the_same_bytes_under_another_media_type_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_media(PICTURE, "image/png")
        with pytest.raises(KeyConflictError, match="media_type is 'image/png' there and 'image/jpeg' here"):
            store.put_media(PICTURE, "image/jpeg")
        with pytest.raises(SchemaError, match="write type/subtype"):
            store.put_media(PICTURE, "png")


def test_a_row_that_refers_to_unknown_bytes_is_refused_with_its_key(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        rows = [rollout(0), rollout(1, messages=[message("https://example.org/a.png", "sha256:" + PICTURE_ID)])]
        with pytest.raises(SchemaError, match=f"experience_id='x1': messages refer to sha256:{PICTURE_ID}"):
            store.append("rollouts", table("rollouts", rows))
        with pytest.raises(SchemaError, match="tasks: task_id='t'"):
            store.append("tasks", table("tasks", [task("t", messages=[message("sha256:" + "0" * 64)])]))
        assert store.version() == 0
        store.put_media(PICTURE, "image/png")
        store.append("rollouts", table("rollouts", rows))
        with connect_store(store) as inspection:
            found = inspection.rows("SELECT media FROM transcripts WHERE experience_id = 'x1'")
        assert found == [{"media": ["https://example.org/a.png", "sha256:" + PICTURE_ID]}]


def test_texts_that_are_no_hash_are_the_callers_own(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.append("rollouts", table("rollouts", [rollout(0, messages=[message("a", "file:///b.png")])]))
        assert store.verify() == []


def test_asking_for_what_is_not_there_says_so(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        with pytest.raises(StoreError, match="there is no attachment"):
            store.media("0" * 64)
        with pytest.raises(StoreError, match="is no media id"):
            store.media("../catalog.sqlite")


@only_local("damages files; see test_store_shared_upkeep.py")
def test_verify_names_missing_changed_and_stray_files(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        lost, changed = store.put_media(b"lost", "text/plain"), store.put_media(b"changed", "text/plain")
        folder = tmp_path / "media"
        (folder / lost[:2] / lost).unlink()
        (folder / changed[:2] / changed).write_bytes(b"other")
        (folder / "notes.txt").write_text("mine")
        with pytest.raises(CorruptSegmentError, match="changed since they were stored"):
            store.media(changed)
        found = store.verify()
        assert {(finding.kind, finding.where) for finding in found} == {
            ("missing_media", f"media/{lost[:2]}/{lost}"),
            ("checksum", f"media/{changed[:2]}/{changed}"),
            ("orphan", "media/notes.txt"),
        }
        (folder / "notes.txt").unlink()
        for data in (b"lost", b"changed"):  # putting the originals in again mends the store
            store.put_media(data, "text/plain")
        assert store.verify() == list[Finding]()


_PUTTER = """
import sys
from buffer_engine.store.opening import open_store
with open_store(sys.argv[1]) as store:
    number = 0
    while True:
        print(store.put_media(b"%d" % number * 50_000, "text/plain"), flush=True)
        number += 1
"""


@pytest.mark.parametrize("acknowledged", [1, 3, 7])
def test_an_acknowledged_attachment_survives_a_kill(tmp_path: Path, acknowledged: int) -> None:
    open_store(tmp_path).close()
    child = subprocess.Popen(
        [sys.executable, "-c", _PUTTER, str(tmp_path)], env=child_environment(), stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    said = [child.stdout.readline().strip() for _ in range(acknowledged)]
    os.kill(child.pid, signal.SIGKILL)
    said += [line.strip() for line in child.stdout.read().splitlines() if len(line.strip()) == 64]
    child.wait()
    with open_store(tmp_path) as store:
        for number, media_id in enumerate(said):
            assert store.media(media_id) == b"%d" % number * 50_000
        # bytes without their row are the one thing that may be left behind
        assert {finding.kind for finding in store.verify()} <= {"orphan"}
