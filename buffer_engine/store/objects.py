"""Segments as immutable objects of an S3-compatible store, and a bounded folder of copies to map them from.

An object is written once under a name nobody else uses and never changed, so a copy of it is never out of date. Copies
are evicted oldest use first; a map outlives the file it was made from, so eviction disturbs no reader.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
from pyarrow import fs

from buffer_engine.errors import StoreError
from buffer_engine.store.addresses import SegmentsAddress
from buffer_engine.store.faults import explained

CACHE_BYTES = 16 << 30
"""Most bytes of copies unless `open_store` is told otherwise. What was used in the last minute is kept in any case."""
ATTACHMENTS = "attachments"
"""Folder of media beside those of the tables, one of which is called `media`."""
_SPARED_SECONDS = 60.0
"""A copy is not deleted between the moment in which its path is given out and the one in which it is mapped."""
_PARTIAL = ".partial"
_AFRESH = ".afresh"
_LONG_AGO = 86_400.0
_PART_BYTES = 8 << 20
_AT_ONCE = 16
_SECONDS = 20.0
_ATTEMPTS = 3


class ObjectFiles:
    """The segment files of one store in a bucket; safe to share between threads and, by its cache, processes."""

    in_place = False

    def __init__(self, cache: Path, address: SegmentsAddress, *, cache_bytes: int = CACHE_BYTES) -> None:
        """Make ready, with copies below `cache`; nothing is asked of the object store yet."""
        self._cache = cache
        self._address = address
        self._most = cache_bytes
        self._lock = threading.Lock()
        self._held: int | None = None
        self._made: tuple[int, fs.FileSystem] | None = None

    def local(self, name: str, *, at_least: int = 0) -> Path:
        """See `SegmentFiles.local`: a copy, fetched when there is none or a broken one.

        Raises:
            FileNotFoundError: there is no such object.
            StoreError: the object store cannot be reached or refuses.
        """
        path = self._cache / name
        try:
            if path.stat().st_size >= at_least:
                os.utime(path)
                return path
        except FileNotFoundError:
            pass
        return self._fetch(name)

    def publish(self, name: str, made: Path) -> None:
        """See `SegmentFiles.publish`: acknowledged by the object store, `made` becomes the copy."""
        with self._explained(name, "write an object"), pa.memory_map(str(made)) as source:
            self._put(name, source.read_buffer())
        self._keep(name, made)

    def write(self, name: str, data: pa.Buffer) -> None:
        """Write an object whose name is new; durable as the object store promises when this returns.

        Raises:
            StoreError: the object store cannot be reached or refuses; nothing refers to what may have been written.
        """
        with self._explained(name, "write an object"):
            self._put(name, data)
        with explained(self._cache, "keep a copy of an object"):
            partial = self._partial(name)
            partial.write_bytes(memoryview(data))  # not synced: a copy that a power cut spoils is fetched again
        self._keep(name, partial)

    def being_written(self, name: str, head: int) -> bool:
        """See `SegmentFiles.being_written`; an object never grows."""
        return False

    def bytes_of(self, names: Sequence[str]) -> int:
        """See `SegmentFiles.bytes_of`: of the objects."""
        if not names:
            return 0
        with self._explained("", "look at objects"):
            found = self._files().get_file_info([self._key(name) for name in names])
        return sum(one.size for one in found if one.type == fs.FileType.File)

    def remove(self, names: Sequence[str]) -> None:
        """See `SegmentFiles.remove`."""
        if len(names) < 2:
            list(map(self._remove, names))
            return
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="remove-objects") as pool:
            list(pool.map(self._remove, names))

    def _remove(self, name: str) -> None:
        with self._explained(name, "remove an object"), suppress(FileNotFoundError):
            self._files().delete_file(self._key(name))
        (self._cache / name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """See `SegmentFiles.names`."""
        return [name for name in self.below("") if not name.startswith(f"{ATTACHMENTS}/")]

    def below(self, folder: str) -> list[str]:
        """Names of all objects in a folder of the store, sorted."""
        with self._explained("", "list objects"):
            found = self._files().get_file_info(
                fs.FileSelector(self._key(folder), recursive=True, allow_not_found=True)
            )
        cut = len(self._key("")) + 1
        return sorted(one.path[cut:] for one in found if one.type == fs.FileType.File)

    @property
    def folder(self) -> Path:
        """Where the copies lie."""
        return self._cache

    def copies(self) -> list[str]:
        """Names of the objects of which there is a copy, attachments aside."""
        folders = (path for path in self._cache.glob("*/") if path.name != ATTACHMENTS and path.suffix != _AFRESH)
        found = (path for folder in folders for path in folder.iterdir() if path.suffix != _PARTIAL)
        return [f"{path.parent.name}/{path.name}" for path in found]

    def drop(self, names: Sequence[str]) -> None:
        """Delete copies, and what processes that were killed long ago had fetched in part or for themselves."""
        for name in names:
            (self._cache / name).unlink(missing_ok=True)
        for path in [*self._cache.glob(f"*/*{_PARTIAL}"), *self._cache.glob(f"*{_AFRESH}/*/*")]:
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _LONG_AGO:
                    path.unlink(missing_ok=True)

    @contextmanager
    def afresh(self) -> Generator[ObjectFiles]:
        """The same objects, with copies of their own that are fetched now and deleted at the end."""
        with explained(self._cache, "make room for copies"):
            self._cache.mkdir(parents=True, exist_ok=True)
            folder = TemporaryDirectory(suffix=_AFRESH, dir=self._cache)
        with folder as path:
            yield ObjectFiles(Path(path), self._address, cache_bytes=self._most)

    def fetch(self, names: Sequence[str]) -> None:
        """See `SegmentFiles.fetch`. A missing object is left to who maps it, which knows what is damaged by that."""
        missing = [name for name in dict.fromkeys(names) if not (self._cache / name).exists()]
        if len(missing) < 2:
            return
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch-objects") as pool:
            list(pool.map(self._fetch_if_there, missing))

    def renew(self, name: str) -> bool:
        """See `SegmentFiles.renew`."""
        self._fetch(name)
        return True

    def _fetch_if_there(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fetch(name)

    def _fetch(self, name: str) -> Path:
        partial = self._partial(name)
        with self._explained(name, "fetch an object"):
            source = self._files().open_input_stream(self._key(name), buffer_size=0)
        with source, explained(partial, "keep a copy of an object"), open(partial, "wb") as copy:
            while part := self._next(name, source):
                copy.write(part)
        return self._keep(name, partial)

    def _next(self, name: str, source: pa.NativeFile) -> pa.Buffer | None:
        with self._explained(name, "fetch an object"):
            part = source.read_buffer(_PART_BYTES)
        return part if part.size else None

    def _put(self, name: str, data: pa.Buffer) -> None:
        with self._files().open_output_stream(self._key(name), buffer_size=0) as sink:
            sink.write(data)

    def _partial(self, name: str) -> Path:
        path = (self._cache / name).with_suffix(f".{os.getpid()}.{threading.get_ident()}{_PARTIAL}")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _keep(self, name: str, made: Path) -> Path:
        path = self._cache / name
        with explained(path, "keep a copy of an object"):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(made, path)
            self._bound(path)
        return path

    def _bound(self, newest: Path) -> None:
        """Delete the copies used longest ago once there are too many bytes of them."""
        with self._lock:
            # counted once, then only added up: what other processes add is seen when this one next runs over
            self._held = newest.stat().st_size + (self._held if self._held is not None else self._most)
            if self._held <= self._most:
                return
            copies: list[tuple[float, int, Path]] = []
            for path in self._cache.rglob("*"):
                try:
                    state = path.stat()
                except FileNotFoundError:  # another process evicts too
                    continue
                if path.is_file():
                    copies.append((state.st_mtime, state.st_size, path))
            self._held = sum(size for _, size, _ in copies)
            just_used = time.time() - _SPARED_SECONDS
            for used, size, path in sorted(copies):
                if used > just_used or self._held <= self._most * 9 // 10:
                    return
                path.unlink(missing_ok=True)
                self._held -= size

    def _files(self) -> fs.FileSystem:
        # the library's threads do not survive a fork
        if self._made is None or self._made[0] != os.getpid():
            options = dict(self._address.options)
            self._made = (
                os.getpid(),
                fs.S3FileSystem(
                    access_key=self._address.access_key,
                    secret_key=self._address.secret_key,
                    endpoint_override=options.get("endpoint_override"),
                    scheme=options.get("scheme", "https"),
                    region=options.get("region")
                    or os.environ.get("AWS_DEFAULT_REGION")
                    or os.environ.get("AWS_REGION"),
                    background_writes=False,
                    request_timeout=float(options.get("request_timeout", _SECONDS)),
                    connect_timeout=float(options.get("request_timeout", _SECONDS)),
                    retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
                    allow_delayed_open=True,
                ),
            )
        return self._made[1]

    def _key(self, name: str) -> str:
        return f"{self._address.bucket}/{self._address.prefix}" + (f"/{name}" if name else "")

    @contextmanager
    def _explained(self, name: str, doing: str) -> Generator[None]:
        place = f"{self._address}" + (f": {name}" if name else "")
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            said = " ".join(str(error).split())
            raise StoreError(
                f"{place}: could not {doing}: the object store says {said!r}; everything acknowledged before is safe: "
                "check the address and AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, then repeat"
            ) from error
