"""Environments of peers: `python -m benchmarks.store.peers_env [PEER …] [--remove]`.

Each peer gets a virtual environment of its own in `bench` of the cache folder (`BUFFER_ENGINE_CACHE`), with the
releases that `peers.KINDS` names: what they need does not fit together, and none of it is ever a dependency of this
project. They take up to 7 GB each where torch comes with CUDA; `--remove` deletes them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.store.peers import KINDS, PeerKind, environments


def make(kind: PeerKind) -> Path:
    """The environment of a peer; one that holds other releases is made anew.

    Raises:
        subprocess.CalledProcessError: pip failed; what it says is on stderr.
    """
    place = environments() / kind.name
    if kind.python() is not None:
        return place
    if place.exists():
        shutil.rmtree(place)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    subprocess.run([str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *kind.requirements], check=True)
    # Written last: an environment without it is half made.
    (place / "requirements.txt").write_text("\n".join(kind.requirements), encoding="utf-8")
    return place


def main(words: list[str]) -> int:
    """Make or remove what was asked; all that need one when none is named."""
    able = [kind for kind in KINDS.values() if kind.requirements]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store.peers_env", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"default: all of {', '.join(k.name for k in able)}")
    parser.add_argument("--remove", action="store_true", help="delete the environments instead")
    given = parser.parse_args(words)
    unknown = sorted(set(given.peers) - {kind.name for kind in able})
    if unknown:
        parser.error(f"{unknown[0]!r} needs no environment or is no peer → one of {', '.join(k.name for k in able)}")
    for kind in able:
        if given.peers and kind.name not in given.peers:
            continue
        place = environments() / kind.name
        if given.remove:
            shutil.rmtree(place, ignore_errors=True)
            print(f"removed: {place}")
        else:
            print(f"{kind.title}: {', '.join(kind.requirements)}", flush=True)
            print(f"  in {make(kind)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
