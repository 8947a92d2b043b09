"""Escapes, really tried inside the sandbox: each must fail there, and leave the machine as it was."""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from operators.sandbox.isolation import UNPRIVILEGED
from operators.sandbox.limits import Limits, Run
from operators.sandbox.running import Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="isolation needs Linux")
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _isolation_is_there() -> None:
    assert Sandbox().missing() == ""


def tried(source: str, *, stdin: bytes = b"", **limits: float) -> Run:
    """The run of a program under small limits."""
    bounds = {"seconds": 5.0, "cpu_seconds": 4, "memory_bytes": 128 * MIB, "processes": 8, **limits}
    return Sandbox(Limits(**bounds)).run_python(source, stdin=stdin)  # type: ignore[arg-type]


def sandboxed_processes(marker: str) -> list[int]:
    """Processes of this machine with `marker` in their command line: what has survived."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in line:
                found.append(int(folder.name))
    return found


def gone(marker: str) -> bool:
    """Whether no process with the marker is left a little later; the kernel needs a moment to bury the dead."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if not sandboxed_processes(marker):
            return True
        time.sleep(0.02)
    return False


def test_a_fork_bomb_meets_the_limit_of_processes_and_is_gone_with_its_run():
    run = tried(
        "import os, time\nfailed = 0\nfor _ in range(200):\n"
        "    try:\n        if os.fork() == 0:\n            time.sleep(60)\n            os._exit(0)\n"
        "    except BlockingIOError:\n        failed += 1\nprint(failed)"
    )
    # eight may exist, and one of them is the program itself
    assert (run.reason, run.stdout) == ("ok", "193\n")
    assert gone("RLIMIT_NPROC")


def test_a_bomb_that_grows_for_ever_ends_with_the_time_limit():
    run = tried(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        seconds=0.5,
        memory_bytes=512 * MIB,
    )
    assert run.reason == "timeout"
    assert run.seconds < 3
    assert gone("RLIMIT_NPROC")


def test_threads_count_as_processes():
    run = tried(
        "import threading, time\nn = 0\ntry:\n    while n < 100:\n"
        "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); n += 1\n"
        "except RuntimeError:\n    print(n)\nimport os, sys; sys.stdout.flush(); os._exit(0)",
        memory_bytes=1024 * MIB,
    )
    assert run.stdout == "7\n"


# In /tmp lies the program itself, so that eight full files do not fit.
@pytest.mark.parametrize(("folder", "full"), [("/tmp", 7), ("/dev/shm", 8)])
def test_filling_the_disk_ends_at_the_size_of_the_private_file_system(folder, full):
    run = tried(
        f"n = 0\ntry:\n    while True:\n        with open('{folder}/f%d' % n, 'wb') as f: f.write(bytes(1 << 20))\n"
        "        n += 1\nexcept OSError as error:\n    print(n, error.errno)",
        disk_bytes=8 * MIB,
    )
    assert run.stdout == f"{full} 28\n"  # no space left on device
    assert not list(Path("/tmp").glob("f0"))


def test_one_file_cannot_exceed_its_limit():
    run = tried(
        "try:\n    with open('big', 'wb', buffering=0) as f:\n        while f.write(bytes(1 << 20)): pass\n"
        "except OSError as error:\n    import os; print(error.errno, os.path.getsize('big'))",
        file_bytes=2 * MIB,
    )
    assert run.stdout == f"27 {2 * MIB}\n"  # file too large


def test_a_flood_of_empty_files_is_stopped():
    run = tried("n = 0\nwhile True:\n    open('f%d' % n, 'w').close(); n += 1", disk_files=500)
    assert (run.reason, run.detail) == ("killed", "it made more than 500 files")


@pytest.mark.parametrize("place", ["/", "/dev", "/usr", "/usr/bin", "/etc", "/proc", "/proc/sys/kernel"])
def test_nothing_outside_the_private_folders_can_be_written(place):
    name = f"escape-{os.getpid()}"
    run = tried(f"open('{place}/{name}', 'w')")
    assert run.reason == "error"
    assert any(kind in run.stderr for kind in ("Read-only file system", "No such file", "Permission denied"))
    assert not Path(place, name).exists()


def test_kernel_settings_cannot_be_written():
    before = Path("/proc/sys/kernel/hostname").read_text()
    run = tried("open('/proc/sys/kernel/hostname', 'w').write('owned')")
    assert run.reason == "error"
    assert Path("/proc/sys/kernel/hostname").read_text() == before


def test_filling_memory_ends_the_program_and_names_memory():
    run = tried("held = []\nwhile True:\n    held.append(bytearray(1 << 20))")
    assert run.reason == "memory"
    assert run.peak_memory_bytes is not None
    assert run.peak_memory_bytes <= 160 * MIB


def test_several_processes_cannot_use_more_memory_together_than_one_may():
    run = tried(
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0: break\n"
        "held = bytearray(b'x') * (60 << 20)\ntime.sleep(9)"
    )
    assert run.reason == "memory"
    assert run.seconds < 4


@pytest.mark.parametrize("number", {"x86_64": [319, 29, 447], "aarch64": [279, 194, 447]}.get(os.uname().machine, []))
def test_memory_that_no_limit_counts_cannot_be_had(number):
    run = tried(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"print(libc.syscall({number}, b'a' if {number} in (319, 279) else 0, 1 << 20, 0o1600), ctypes.get_errno())"
    )
    assert run.stdout == "-1 1\n"  # operation not permitted


def test_secrets_are_not_to_be_seen(tmp_path, monkeypatch):
    store = tmp_path / "store"
    store.mkdir()
    secret = store / "secret.txt"
    secret.write_text("the secret of the store")
    for folder in (store, *store.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(0o755)  # so that only the sandbox stands before it
    secret.chmod(0o644)
    monkeypatch.setenv("API_TOKEN", "the secret of the environment")
    places = [
        "/etc/shadow", "/etc/passwd", str(secret), str(Path.home()), "/root", "/home", "/var", "/work", "/run",
        f"/proc/{os.getpid()}/environ", f"/proc/1/root{secret}", f"/proc/self/root{secret}", f"/tmp/../{secret}",
    ]  # fmt: skip
    run = tried(
        f"import os\nfor place in {places!r}:\n    try:\n"
        "        print(place, os.listdir(place) if os.path.isdir(place) else open(place).read())\n"
        "    except OSError: pass\n"
        "print(dict(os.environ))\nprint(open('/proc/1/environ').read())\nprint(open('/proc/self/environ').read())\n"
        "print(os.listdir('/'), os.listdir('/tmp'))"
    )
    assert run.reason == "ok"
    assert "secret" not in run.stdout
    assert not any(line.startswith(tuple(places)) for line in run.stdout.splitlines())
    assert run.stdout.splitlines()[-1].endswith("['main.py']")


def test_open_files_of_ours_are_not_inherited():
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        run = tried("import os\nprint(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[:-1])")
    finally:
        os.close(read)
        os.close(write)
    assert run.stdout == "[0, 1, 2]\n"  # the last one is the listing itself


CONNECT = "import socket\ns = socket.socket(socket.{family}, socket.{kind})\ns.settimeout(2)\n{act}\nprint('out')"


def test_tcp_does_not_leave_the_sandbox():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        address = server.getsockname()
        run = tried(CONNECT.format(family="AF_INET", kind="SOCK_STREAM", act=f"s.connect({address!r})"))
        with pytest.raises(TimeoutError):
            server.accept()
    assert run.reason == "error"
    assert "out" not in run.stdout


def test_udp_does_not_leave_the_sandbox():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(0.5)
        address = server.getsockname()
        tried(CONNECT.format(family="AF_INET", kind="SOCK_DGRAM", act=f"s.sendto(b'x', {address!r})"))
        with pytest.raises(TimeoutError):
            server.recv(1)
    outside = tried(CONNECT.format(family="AF_INET", kind="SOCK_DGRAM", act="s.sendto(b'x', ('192.0.2.1', 53))"))
    assert "Network is unreachable" in outside.stderr


@pytest.mark.parametrize("name", ["/tmp/buffer-engine-escape.socket", "\0buffer-engine-escape"])
def test_unix_sockets_of_the_machine_cannot_be_reached(name):
    Path("/tmp/buffer-engine-escape.socket").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        server.settimeout(0.5)
        if not name.startswith("\0"):
            os.chmod(name, 0o777)
        run = tried(CONNECT.format(family="AF_UNIX", kind="SOCK_STREAM", act=f"s.connect({name!r})"))
        with pytest.raises(TimeoutError):
            server.accept()
    Path("/tmp/buffer-engine-escape.socket").unlink(missing_ok=True)
    assert run.reason == "error"


@pytest.mark.parametrize("family", ["AF_VSOCK", "AF_NETLINK", "AF_PACKET"])
def test_other_socket_families_are_denied(family):
    run = tried(f"import socket\nsocket.socket(socket.{family}, socket.SOCK_DGRAM)")
    assert "PermissionError" in run.stderr


def test_parents_and_strangers_cannot_be_signalled():
    with subprocess.Popen(["sleep", "60"]) as stranger:
        got: list[int] = []
        previous = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
        try:
            run = tried(
                f"import os, signal\nfor pid in ({os.getpid()}, {stranger.pid}):\n"
                "    for number in (signal.SIGTERM, signal.SIGKILL):\n"
                "        try: os.kill(pid, number)\n        except OSError as error: print(error.errno)"
            )
            time.sleep(0.1)
            assert got == []
            assert stranger.poll() is None
        finally:
            signal.signal(signal.SIGTERM, previous)
            stranger.kill()
    assert run.stdout.split() == ["3"] * 4  # no such process


def test_killing_the_first_process_of_the_sandbox_does_not_free_it():
    run = tried(
        "import os, signal, time\nos.kill(1, signal.SIGKILL)\ntime.sleep(0.2)\nprint(os.path.exists('/proc/1'))"
    )
    assert (run.reason, run.stdout) == ("ok", "True\n")


def test_the_processes_of_others_are_not_in_proc():
    run = tried("import os\nprint(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))")
    assert run.stdout == "[1, 2]\n"


def test_ptrace_is_denied_and_so_is_reading_other_memory():
    run = tried(
        "import ctypes, os, time\nlibc = ctypes.CDLL(None, use_errno=True)\nchild = os.fork()\n"
        "if child == 0: time.sleep(5)\n"
        "print(libc.ptrace(16, child, 0, 0), ctypes.get_errno())\nprint(libc.ptrace(16, 1, 0, 0), ctypes.get_errno())\n"
        "os.kill(child, 9)"
    )
    assert run.stdout == "-1 1\n-1 1\n"


def test_symbolic_links_lead_to_nothing_outside(tmp_path):
    target = tmp_path / "target"
    run = tried(
        f"import os\nos.symlink('{target}', 'link')\nos.symlink('/etc/shadow', 'shadow')\n"
        "os.symlink('/proc/1/root', 'root')\n"
        "for name in ('shadow', 'root/etc/shadow', 'link'):\n"
        "    try: print(open(name).read())\n    except OSError as error: print(error.errno)\n"
        "open('link', 'w')"
    )
    assert run.stdout.split()[0] == "2"
    assert set(run.stdout.split()) <= {"2", "13"}
    assert run.reason == "error"
    assert not target.exists()


def test_hard_links_to_files_of_the_system_cannot_be_made():
    run = tried("import os\nos.link('/usr/bin/env', '/tmp/env')")
    assert run.reason == "error"


def test_huge_output_is_cut_counted_and_marked():
    run = tried("while True:\n    print('x' * 1000)", output_bytes=10_000)
    assert run.reason == "output_limit"
    assert run.stdout_bytes > 10_000
    assert run.stdout.endswith(f"\n[output cut: 10000 of {run.stdout_bytes} bytes are kept]\n")
    assert run.stdout.startswith("x" * 1000 + "\n")


def test_huge_error_output_is_cut_in_the_same_way():
    run = tried("import sys\nwhile True:\n    sys.stderr.write('x' * 1000)", output_bytes=10_000)
    assert run.reason == "output_limit"
    assert "[output cut: 10000 of " in run.stderr


def test_a_program_that_ignores_every_signal_is_killed_all_the_same():
    run = tried(
        "import signal\nfor number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        seconds=0.5,
    )
    assert run.reason == "timeout"
    assert run.seconds < 2
    assert gone("RLIMIT_NPROC")


def test_ignoring_the_signal_of_the_processor_time_gains_one_second():
    run = tried(
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", cpu_seconds=1, seconds=30
    )
    assert (run.reason, run.exit_code) == ("killed", 137)


@pytest.mark.parametrize("ending", ["os._exit(0)", "time.sleep(60)"])
def test_processes_in_the_background_end_with_the_run(ending):
    run = tried(
        "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
        "    os.execv('/bin/sh', ['sh', '-c', 'trap \"\" TERM HUP INT; while :; do sleep 1; done', 'outlives-4711'])\n"
        f"time.sleep(0.2)\n{ending}",
        seconds=1,
    )
    assert run.reason == ("ok" if "exit" in ending else "timeout")
    assert run.seconds < 5
    assert gone("outlives-4711")


def test_a_background_process_that_holds_the_output_does_not_hold_the_run():
    run = tried("import os, time\nprint('done', flush=True)\nif os.fork() == 0:\n    time.sleep(60)")
    assert (run.reason, run.stdout) == ("ok", "done\n")
    assert run.seconds < 2


def test_the_sandbox_dies_with_the_process_that_started_it():
    marker = f"orphan-{os.getpid()}"
    source = (
        "from operators.sandbox.running import Sandbox\n"
        f"Sandbox().run(['sh', '-c', 'while :; do sleep 1; done', '{marker}'])"
    )
    with subprocess.Popen([sys.executable, "-c", source], start_new_session=True) as parent:
        end = time.monotonic() + 30
        while len([pid for pid in sandboxed_processes(marker) if pid != parent.pid]) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(sandboxed_processes(marker)) >= 2
        parent.kill()
    assert gone(marker)


MOUNT = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.{call}, ctypes.get_errno())"


@pytest.mark.parametrize(
    "call",
    [
        "mount(b'none', b'/tmp', b'tmpfs', 0, 0)", "umount2(b'/usr', 2)", "chroot(b'/tmp')", "unshare(0x10000000)",
        "unshare(0x00020000)", "setns(0, 0)", "syscall(165, b'/', b'/tmp', 0, 4096 | 32, 0)",
    ],
)  # fmt: skip
def test_mounts_and_namespaces_cannot_be_changed(call):
    assert tried(MOUNT.format(call=call)).stdout == "-1 1\n"


def test_a_new_user_namespace_is_denied_even_through_clone():
    number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    run = tried(MOUNT.format(call=f"syscall({number}, 0x10000000 | 17, 0, 0, 0, 0)"))
    assert run.stdout.split()[0] == "-1"


def test_another_user_cannot_be_taken_on():
    run = tried(
        "import os\nfor act in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), "
        "lambda: os.chown('main.py', 0, 0), lambda: os.nice(-5)):\n"
        "    try: act(); print('done')\n    except OSError as error: print(error.errno)\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line[:6] in ('CapEff', 'CapPrm', 'NoNewP')])"
    )
    lines = run.stdout.split("\n")
    assert "done" not in lines
    assert lines[5] == "['0000000000000000', '0000000000000000', '1']"


def test_setuid_programs_give_nothing():
    run = Sandbox().run(
        [
            "sh",
            "-c",
            "cp /usr/bin/id /tmp/id; chmod 4755 /tmp/id; /tmp/id -u; /usr/bin/su -c id; /usr/bin/passwd -S root",
        ]
    )
    expected = UNPRIVILEGED if os.geteuid() == 0 else os.geteuid()
    assert run.stdout.split("\n")[0] == str(expected)
    assert "uid=0" not in run.stdout


def test_limits_cannot_be_raised():
    run = tried(
        "import resource\nfor name in ('AS', 'NPROC', 'CPU', 'FSIZE', 'NOFILE', 'CORE'):\n"
        "    kind = getattr(resource, 'RLIMIT_' + name)\n"
        "    try: resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2); print('raised')\n"
        "    except (ValueError, OSError): print('kept')"
    )
    assert run.stdout == "kept\n" * 6


def test_devices_of_the_machine_are_not_there():
    run = tried("import os\nprint(sorted(os.listdir('/dev')))")
    assert "vda" not in run.stdout
    assert set(ast.literal_eval(run.stdout)) <= {
        "console", "core", "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty",
        "urandom", "zero",
    }  # fmt: skip


def test_twenty_hostile_programs_at_once_leave_each_other_and_us_alone():
    """Each sees only its own processes and files, whatever the others do."""
    source = (
        "import os, time\nopen('mine', 'w').write('x')\nif os.fork() == 0: time.sleep(60)\ntime.sleep(0.2)\n"
        "print(sorted(os.listdir('.')), len([n for n in os.listdir('/proc') if n.isdigit()]))"
    )
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(tried(source).stdout)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["['main.py', 'mine'] 3\n"] * 20
    assert gone("RLIMIT_NPROC")
