"""An environment for Data-Juicer: `python -m operators.bridge.juicer_env FOLDER`.

Data-Juicer pins dill, multiprocess and emoji to single releases, so it is given a virtual environment of its own; the
operator names its interpreter in `python`. The packages are those of `requirements()`, of which the table of operators
says who needs them. Nothing is installed later, whatever an operator asks for.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from operators.bridge.juicer_table import juicer_table

# aiohttp is imported by Data-Juicer at every start, and declared by none of its packages.
_PINS = {"aiohttp": "3.14.5", "ftfy": "6.3.1", "opencc": "1.4.2", "selectolax": "1.0.2"}
_MARK = "requirements.txt"


def requirements() -> tuple[str, ...]:
    """The packages with their releases."""
    table = juicer_table()
    needed = sorted({"aiohttp", *(package for op in table.ops.values() for package in op.needs)})
    return (f"py-data-juicer=={table.release}", *(f"{package}=={_PINS[package]}" for package in needed))


def interpreter(folder: Path) -> Path | None:
    """The interpreter of a finished environment with the right releases; None when there is none."""
    mark = folder / _MARK
    made = mark.is_file() and mark.read_text(encoding="utf-8") == "\n".join(requirements())
    return folder / "bin" / "python" if made else None


def make(folder: Path) -> Path:
    """The interpreter of the environment in `folder`; one with other releases is made anew.

    Raises:
        FileExistsError: the folder holds something else.
        subprocess.CalledProcessError: pip failed; what it says is on stderr.
    """
    found = interpreter(folder)
    if found is not None:
        return found
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "pyvenv.cfg").is_file():
            raise FileExistsError(f"{folder} is not empty and no environment: name another folder")
        shutil.rmtree(folder)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements()], check=True)
    # Written last: an environment without it is half made.
    (folder / _MARK).write_text("\n".join(requirements()), encoding="utf-8")
    return python


def main(words: list[str]) -> int:
    """Make what was asked for; print what it took, and the interpreter."""
    parser = argparse.ArgumentParser(
        prog="python -m operators.bridge.juicer_env",
        description="Make an environment with Data-Juicer and nothing of ours.",
    )
    parser.add_argument("folder", type=Path, help="where the environment goes")
    folder = parser.parse_args(words).folder.resolve()
    start = time.monotonic()
    python = make(folder)
    size = sum(file.lstat().st_size for file in folder.rglob("*"))
    print(f"{size / 2**20:.0f} MiB, {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
