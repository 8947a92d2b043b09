"""Whether somebody else's folder is imported in place of one of ours.

The packages have everyday names (`operators/`, `trainers/`), and Python takes the first folder of that name on its
path: with `python -m` or PYTHONPATH, a project's own `operators/` can come before ours, and then nothing fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("buffer_engine", "operators", "explorers", "trainers", "pipelines")
ROOT = Path(__file__).resolve().parents[2]
"""Folder that holds the five packages: the repository, or site-packages."""


@dataclass(frozen=True, slots=True)
class Shadow:
    """A package of ours whose name leads elsewhere; `found` is None when nothing of the name can be imported."""

    package: str
    found: Path | None

    def render(self) -> str:
        """What is wrong and what to do."""
        ours = ROOT / self.package
        if self.found is None:
            return f"package {self.package!r} cannot be imported; it should be {ours} → install buffer-engine again"
        return (
            f"{self.found} is imported in place of {ours}: a folder of yours has the name of a package of "
            f"buffer-engine and comes first on Python's path → run `buffer-engine` (not `python -m`) from another "
            f"folder, take {self.found.parent} out of PYTHONPATH, or rename the folder"
        )


def shadows() -> list[Shadow]:
    """Packages of ours that an import would not find; imports none of them."""
    found: list[Shadow] = []
    for package in PACKAGES:
        spec = find_spec(package)
        place = Path(spec.origin).resolve().parent if spec is not None and spec.origin is not None else None
        if place != ROOT / package:
            found.append(Shadow(package, place))
    return found


def lookalikes(folder: Path) -> list[Path]:
    """Folders in `folder` that would shadow ours if it came first on Python's path."""
    return [
        folder / package
        for package in PACKAGES
        if (folder / package / "__init__.py").is_file() and (folder / package).resolve() != ROOT / package
    ]
