"""Operating-system and SQLite failures, turned into errors that say what to do.

Every place that touches a file or the catalog runs inside `explained`, so that a full disk never reaches a person as
`OperationalError`.
"""

from __future__ import annotations

import errno
import resource
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from buffer_engine.errors import StoreBusyError, StoreError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_KEPT = "everything acknowledged before is safe"


@contextmanager
def explained(path: Path, doing: str) -> Generator[None]:
    """Raise what goes wrong inside as a `StoreError` about `path`; `doing` completes "could not …"."""
    try:
        yield
    except OSError as error:
        raise of_os_error(error, path, doing) from error
    except sqlite3.Error as error:
        raise of_sqlite_error(error, path, doing) from error
    except UnicodeDecodeError as error:  # SQLite names what is damaged in the bytes that it found there
        raise damaged_catalog(error, path, doing) from error


def of_os_error(error: OSError, path: Path, doing: str) -> StoreError:
    """The store error for a failed system call."""
    cause = error.strerror or str(error)
    if error.errno in _FULL:
        return StoreError(
            f"{path}: could not {doing}: the disk (or a quota or file-size limit) is full [{cause}]; "
            f"{_KEPT}: free space, then repeat the same write"
        )
    if error.errno in _READ_ONLY:
        return StoreError(
            f"{path}: could not {doing}: the folder is read-only or not yours [{cause}]; "
            "open it with read_only=True, or make it writable"
        )
    return StoreError(
        f"{path}: could not {doing}: the device reported {cause!r}; {_KEPT}: check the disk, then run verify"
    )


def damaged_catalog(error: Exception, path: Path, doing: str) -> StoreError:
    """The store error for a catalog that SQLite cannot read."""
    return StoreError(
        f"{path}: could not {doing}: the catalog is damaged or not a catalog [{error}]; restore catalog.sqlite "
        f"(and its -wal file) from a copy, or make a new store: buffer-engine store recover {path} --into NEW"
    )


def of_sqlite_error(error: sqlite3.Error, path: Path, doing: str) -> StoreError:
    """The store error for a failed catalog statement."""
    code: str = getattr(error, "sqlite_errorname", "") or ""
    if code.startswith("SQLITE_FULL"):
        return StoreError(
            f"{path}: could not {doing}: the disk is full [{error}]; {_KEPT}: free space, then repeat the same write"
        )
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreBusyError(
            f"{path}: could not {doing}: another process held the catalog for too long [{error}]; repeat the write"
        )
    if code.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")):
        return StoreError(
            f"{path}: could not {doing}: the catalog is read-only [{error}]; "
            "open it with read_only=True, or make the folder writable"
        )
    if code.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return damaged_catalog(error, path, doing)
    if code.startswith("SQLITE_CANTOPEN"):
        return StoreError(
            f"{path}: could not {doing}: the catalog cannot be opened [{error}]; "
            "a read-only folder with an unfinished write-ahead log must be copied to a writable place first"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if code == "SQLITE_IOERR_WRITE" and limit != resource.RLIM_INFINITY:  # SQLite does not say that a limit stopped it
        return StoreError(
            f"{path}: could not {doing}: the disk (or a quota or file-size limit) is full [{error}; files of this "
            f"process end at {limit:,} bytes]; {_KEPT}: free space or raise the limit, then repeat the same write"
        )
    return StoreError(f"{path}: could not {doing}: {type(error).__name__}: {error}; {_KEPT}: check the disk")
