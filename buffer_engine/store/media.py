"""Attachments by content: bytes kept once under their hash, durable before a row can refer to them.

A message refers to one by `sha256:<media_id>` in `messages.media`; any other text there (a URL, a name) is the
caller's own and is not looked at. A row that refers to bytes the store has not got is refused.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from buffer_engine.errors import CorruptSegmentError, SchemaError, StoreError
from buffer_engine.schema import MEDIA, TableSpec
from buffer_engine.store import index
from buffer_engine.store.base import Durability, Finding
from buffer_engine.store.connection import Connection
from buffer_engine.store.faults import explained
from buffer_engine.store.files import sync_path
from buffer_engine.store.staging import Staged
from buffer_engine.store.validate import row_label

if TYPE_CHECKING:
    from buffer_engine.store.append import Appender

MEDIA_FOLDER = "media"
PREFIX = "sha256:"
"""What a reference to stored bytes begins with."""

PART = ".part-"
"""How the name of bytes that have no id yet begins."""
_HEX = frozenset("0123456789abcdef")


class MediaFiles(Protocol):
    """Where the bytes lie, one object per id."""

    def scratch(self) -> Path:
        """A path on this machine for bytes that have no id yet; what is left there after a crash is nobody's."""
        ...

    def publish(self, media_id: str, made: Path) -> None:
        """Take over a finished file under its id, durably; `made` is gone afterwards. A repeat is harmless.

        Raises:
            StoreError: the disk is full or read-only, or the object store refuses.
        """
        ...

    def local(self, media_id: str) -> Path:
        """A path on this machine from which the bytes can be read.

        Raises:
            FileNotFoundError: there are none.
        """
        ...

    def renew(self, media_id: str) -> bool:
        """Replace a copy whose bytes are wrong by a fresh one; False when the file here is the only one.

        Raises:
            FileNotFoundError: there are none any more.
        """
        ...

    def ids(self) -> list[str]:
        """Everything that is there, sorted; what is not named like an id comes with its path below the folder."""
        ...


class LocalMediaFiles:
    """Files `media/<first two digits>/<id>` below the store's own folder."""

    def __init__(self, root: Path, *, durability: Durability = "power") -> None:
        """Below the store folder `root`; with `durability="process"` nothing is synced."""
        self._folder = root / MEDIA_FOLDER
        self._durable = durability == "power"

    def scratch(self) -> Path:
        """See `MediaFiles.scratch`."""
        with explained(self._folder, "store an attachment"):
            self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{PART}{os.getpid()}-{secrets.token_hex(6)}"

    def publish(self, media_id: str, made: Path) -> None:
        """See `MediaFiles.publish`."""
        target = media_path(self._folder, media_id)
        with explained(target, "store an attachment"):
            target.parent.mkdir(parents=True, exist_ok=True)
            if self._durable:
                sync_path(made)
            os.replace(made, target)
            if self._durable:
                for folder in (target.parent, self._folder, self._folder.parent):
                    sync_path(folder)

    def local(self, media_id: str) -> Path:
        """See `MediaFiles.local`."""
        path = media_path(self._folder, media_id)
        if not path.is_file():
            raise FileNotFoundError(path)
        return path

    def renew(self, media_id: str) -> bool:
        """See `MediaFiles.renew`; a file in a folder is the only one."""
        return False

    def ids(self) -> list[str]:
        """See `MediaFiles.ids`; what a live process is writing is left out."""
        if not self._folder.is_dir():
            return []
        files = [path for path in self._folder.rglob("*") if path.is_file() and not _being_written(path)]
        return sorted(
            path.name if path == media_path(self._folder, path.name) else str(path.relative_to(self._folder))
            for path in files
        )


class MediaStore:
    """Puts attachments into a store and gives them back."""

    def __init__(self, files: MediaFiles, appender: Appender) -> None:
        self._files = files
        self._appender = appender

    def put(self, data: bytes | os.PathLike[str], media_type: str, *, name: str | None = None) -> str:
        """See `LocalStore.put_media`."""
        kind, _, sub = media_type.partition("/")
        if not kind or not sub:
            raise SchemaError(f"media: media_type is {media_type!r}; write type/subtype, such as image/png")
        made = self._files.scratch()
        try:
            with explained(made, "store an attachment"):
                media_id, size = _copy_hashed(data, made)
            # Written again even when it is there: whoever puts bytes may be mending a store that lost them.
            self._files.publish(media_id, made)
        finally:
            made.unlink(missing_ok=True)
        given = name if name is not None else None if isinstance(data, bytes) else Path(data).name
        row = {
            "media_id": media_id, "media_type": media_type, "bytes": size, "name": given,
            "created_at": datetime.now(UTC),
        }  # fmt: skip
        self._appender.append_all({"media": pa.Table.from_pylist([row], schema=MEDIA.schema)})
        return media_id

    def get(self, media_id: str) -> bytes:
        """See `LocalStore.media`."""
        wanted = media_id.removeprefix(PREFIX)
        if not is_media_id(wanted):
            raise StoreError(f"{media_id!r} is no media id; it is the sha256 of the bytes, 64 hexadecimal digits")
        try:
            path, data, found = self._read(wanted)
            if found != wanted and self._files.renew(wanted):  # only the copy on this machine may be bad
                path, data, found = self._read(wanted)
        except FileNotFoundError as error:
            raise StoreError(f"there is no attachment {wanted}; check the id or the store") from error
        if found != wanted:
            raise CorruptSegmentError(
                f"{path}: the bytes have changed since they were stored (sha256 {found}); put the original in again"
            )
        return data

    def _read(self, media_id: str) -> tuple[Path, bytes, str]:
        path = self._files.local(media_id)
        with explained(path, "read an attachment"):
            data = path.read_bytes()
        return path, data, hashlib.sha256(data).hexdigest()


def media_path(folder: Path, media_id: str) -> Path:
    """Where the file of an id is below a media folder."""
    return folder / media_id[:2] / media_id


def references(messages: pa.Array) -> set[str]:
    """Ids of the stored attachments that a `messages` column refers to; other media texts are left out."""
    # Most rows have none, which the child array tells at once whatever the rows weigh.
    inner = messages.values.field(messages.type.value_type.get_field_index("media"))
    if not len(inner.values):
        return set()
    texts = pc.list_flatten(pc.struct_field(pc.list_flatten(messages), "media"))
    found = texts.filter(pc.fill_null(pc.starts_with(texts, PREFIX), False)).unique()
    return {text.removeprefix(PREFIX) for text in found.to_pylist()}


def check_media(connection: Connection, staged: Sequence[Staged]) -> None:
    """Every attachment that arriving rows refer to is stored or arrives with them.

    Raises:
        SchemaError: names the row and the id that is neither.
    """
    wanted: dict[str, Staged] = {}
    for part in staged:
        if "messages" in part.batch.schema.names:
            for media_id in references(part.batch.column("messages")):
                wanted.setdefault(media_id, part)
    if not wanted:
        return
    arriving = {key[0] for part in staged if part.spec.name == "media" for key in part.keys}
    stored = {key[0] for key in index.stored(connection, MEDIA, [(media_id,) for media_id in sorted(wanted)])}
    unknown = sorted(set(wanted) - arriving - stored)
    if unknown:
        part = wanted[unknown[0]]
        at = next(
            row for row in range(part.batch.num_rows)
            if unknown[0] in references(part.batch.column("messages").slice(row, 1))
        )  # fmt: skip
        raise SchemaError(
            f"{part.spec.name}: {row_label(part.spec, part.batch, at)}: messages refer to {PREFIX}{unknown[0]}, which "
            f"the store has not got ({len(unknown)} such id(s)); put_media first, and write what it returns after "
            f"{PREFIX!r}"
        )


class MediaAudit:
    """What `verify` asks about attachments; fed with every batch it reads."""

    def __init__(self, files: MediaFiles) -> None:
        self._files = files
        self._listed: dict[str, int] = {}
        self._wanted: dict[str, str] = {}

    def read(self, spec: TableSpec, batch: pa.RecordBatch) -> None:
        """Take note of a batch of any table."""
        if spec.name == "media":
            sizes = zip(batch.column("media_id").to_pylist(), batch.column("bytes").to_pylist(), strict=True)
            self._listed.update(sizes)
        elif "messages" in batch.schema.names:
            for media_id in references(batch.column("messages")):
                self._wanted.setdefault(media_id, spec.name)

    def findings(self) -> Iterator[Finding]:
        """Attachments that are missing, changed, referred to without a row, or that no row knows."""
        there = set(self._files.ids())
        for media_id, size in sorted(self._listed.items()):
            where = f"{MEDIA_FOLDER}/{media_id[:2]}/{media_id}"
            if media_id not in there:
                yield Finding("missing_media", where, "the table media lists it and the file is gone; put it in again")
                continue
            path = self._files.local(media_id)
            found = media_hash(path)
            if found != media_id and self._files.renew(media_id):
                found = media_hash(path)
            if found != media_id:
                said = f"the bytes hash to {found}, and {size} bytes were stored where {path.stat().st_size} are"
                yield Finding("checksum", where, f"{said}; put the original in again")
        for media_id, table in sorted(self._wanted.items()):
            if media_id not in self._listed:
                yield Finding(
                    "missing_media", table, f"messages refer to {PREFIX}{media_id}, which media has no row of"
                )
        for name in sorted(there - set(self._listed)):
            yield Finding("orphan", f"{MEDIA_FOLDER}/{name}", "no row of the table media knows this file")


def _being_written(path: Path) -> bool:
    """Whether this is a part of a process that still lives; one that was killed leaves its part behind."""
    if not path.name.startswith(PART):
        return False
    try:
        os.kill(int(path.name.removeprefix(PART).partition("-")[0]), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):
        return True
    return True


def _copy_hashed(data: bytes | os.PathLike[str], target: Path) -> tuple[str, int]:
    """Write the bytes to `target`; their sha256 and how many they are."""
    digest = hashlib.sha256()
    size = 0
    with open(target, "wb") as out:
        for block in _blocks(data):
            digest.update(block)
            out.write(block)
            size += len(block)
    return digest.hexdigest(), size


def _blocks(data: bytes | os.PathLike[str]) -> Iterable[bytes]:
    if isinstance(data, bytes):
        yield data
        return
    with open(data, "rb") as source:
        while block := source.read(1 << 20):
            yield block


def media_hash(path: Path) -> str:
    """The id of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_media_id(text: str) -> bool:
    """Whether this is the name that some bytes would get."""
    return len(text) == 64 and _HEX.issuperset(text)
