"""The process in which Data-Juicer lives: Arrow in, Arrow out, nothing installed and nothing fetched.

It is started as a script, maybe by another interpreter than ours, so it uses the standard library, pyarrow and
Data-Juicer alone. Data-Juicer installs packages on its own when an operator is made or run, fetches models when first
used, resets the host's logging and loses whole batches on an error; here its installer is replaced, connections and
installing commands are refused by an audit hook, and its per-row methods are called directly.

A message is two lengths (8 bytes each, big-endian), that many bytes of JSON, and an Arrow stream (or none).
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose modules must not hide packages

import contextlib
import faulthandler
import inspect
import json
import math
import os
import struct
import typing
from importlib import import_module as module
from importlib.metadata import PackageNotFoundError, version

import pyarrow as pa

_GRACE_SECONDS = 5.0
_INSTALLERS = {"pip", "pip3", "uv", "conda", "mamba", "apt", "apt-get", "git", "curl", "wget"}


class Guard:
    """What the process may not do, and what it tried all the same."""

    def __init__(self) -> None:
        self.network = False
        self.refused: list[dict[str, str]] = []

    def audit(self, event: str, words: tuple[typing.Any, ...]) -> None:
        """Refuse connections (unless allowed) and commands that install or fetch."""
        if event in ("socket.connect", "socket.sendto") and not self.network and isinstance(words[1], tuple):
            self.refuse("network", str(words[1][0]))
        elif event == "socket.getaddrinfo" and not self.network:
            self.refuse("network", str(words[0]))
        elif event == "os.system":
            self.refuse("command", os.fsdecode(words[0]))
        elif event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
            line = words[1] if isinstance(words[1], str | bytes) else b" ".join(os.fsencode(word) for word in words[1])
            text = os.fsdecode(line)
            if _INSTALLERS & {os.path.basename(word) for word in text.split()}:
                self.refuse("command", text)

    def install(self, package: str, options: typing.Any = None) -> None:
        """In the place of Data-Juicer's installer."""
        self.refuse("package", str(package))

    def refuse(self, kind: str, what: str) -> None:
        """Remember it, because the operator may swallow the exception."""
        self.refused.append({"kind": kind, "what": what})
        raise ImportError(f"refused: {kind} {what}")

    def taken(self) -> dict[str, str] | None:
        """The first refusal since this was last asked."""
        first = self.refused[0] if self.refused else None
        self.refused.clear()
        return first


class Juicer:
    """The operators that were made here, by the keys of those who asked for them."""

    def __init__(self, guard: Guard) -> None:
        self.classes: typing.Any = module("data_juicer.ops").OPERATORS.modules
        base: typing.Any = module("data_juicer.ops.base_op")
        logger: typing.Any = module("loguru").logger
        logger.remove()
        logger.add(sys.stderr, level="ERROR")
        loader: typing.Any = module("data_juicer.utils.lazy_loader").LazyLoader
        loader._install_package = staticmethod(guard.install)
        self.guard, self.kinds = guard, (base.Filter, base.Mapper, base.OP)
        self.stats_field: str = module("data_juicer.utils.constant").Fields.stats
        self.made: dict[str, typing.Any] = {}
        self.operator: typing.Any = None
        with contextlib.suppress(ImportError):
            # The first one that is made imports Ray, which is an optional package of it, and goes on when made again.
            self.classes["clean_ip_mapper"]()
        guard.taken()
        sys.addaudithook(guard.audit)

    def open(self, key: str, name: str, settings: dict[str, typing.Any], network: bool) -> dict[str, typing.Any]:
        """Make the operator; says `effect`, or what is in the way."""
        self.guard.network = network
        if name not in self.classes:
            return {"unknown": name, "known": sorted(self.classes)}
        found = self.classes[name]
        row_filter, mapper, base = self.kinds
        if not issubclass(found, (row_filter, mapper)):
            return {"unsupported": found.__mro__[1].__name__}
        known = arguments_of(found, base)
        strange = [argument for argument in settings if argument not in known]
        if strange:
            return {"strange": strange[0], "known": sorted(known)}
        try:
            operator = found(**settings, auto_op_parallelism=False, num_proc=None, skip_op_error=False)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the reply carries it
            return {"refused": self.guard.taken(), "failed": described(error)}
        refused = self.guard.taken()
        if refused is not None:
            return {"refused": refused, "failed": ""}
        self.made[key] = operator
        return {"effect": "filter" if issubclass(found, row_filter) else "map"}

    @property
    def filters(self) -> bool:
        """Whether the operator in use is a filter."""
        return isinstance(self.operator, self.kinds[0])

    def run(
        self, key: str, rows: dict[str, list[typing.Any]], stats: list[str]
    ) -> tuple[dict[str, typing.Any], typing.Any]:
        """Results of all rows; where the batch fails, of each row on its own."""
        self.operator = self.made[key]
        height = len(next(iter(rows.values())))
        errors: dict[int, str] = {}
        try:
            results = self.results({name: list(values) for name, values in rows.items()}, height, stats)
        except (Exception, SystemExit):  # noqa: BLE001 - found again below, on its row
            results = []
            for row in range(height):
                try:
                    results += self.results({name: [values[row]] for name, values in rows.items()}, 1, stats)
                except (Exception, SystemExit) as error:  # noqa: BLE001 - the reply carries it
                    errors[row] = described(error)
                    results.append({})
        refused = self.guard.taken()
        if refused is not None:
            return {"refused": refused, "failed": next(iter(errors.values()), "")}, None
        columns = {"keep": pa.bool_(), **{f"stat:{name}": pa.float64() for name in stats}} if self.filters else {}
        columns = columns or {"text": pa.string()}
        table = pa.table(
            {name: pa.array([result.get(name) for result in results], kind) for name, kind in columns.items()}
        )
        return {"errors": {str(row): text for row, text in errors.items()}}, table

    def results(self, rows: dict[str, list[typing.Any]], height: int, stats: list[str]) -> list[dict[str, typing.Any]]:
        """One result a row; an exception when the operator raises or does not answer row by row."""
        operator = self.operator
        if not self.filters:
            texts = self.texts(rows, height)
            if len(texts) != height:
                raise ValueError(f"it made {len(texts)} rows of {height}; only operators that keep rows can be used")
            strange = [text for text in texts if not isinstance(text, str)]
            if strange:
                raise ValueError(f"it made {strange[0]!r:.80} of a text")
            "".join(texts).encode()  # lone surrogates are no text
            return [{"text": text} for text in texts]
        rows[self.stats_field] = [{} for _ in range(height)]
        if operator.is_batched_op():
            rows = operator.compute_stats_batched(rows)
            keep = [bool(value) for value in operator.process_batched(rows)]
        else:
            done = [operator.compute_stats_single(one) for one in singles(rows, height)]
            keep = [bool(operator.process_single(one)) for one in done]
            rows = {self.stats_field: [one[self.stats_field] for one in done]}
        if len(keep) != height:
            raise ValueError(f"it gave {len(keep)} answers for {height} rows")
        found = rows[self.stats_field]
        return [
            {"keep": keep[row], **{f"stat:{name}": number(found[row].get(name)) for name in stats}}
            for row in range(height)
        ]

    def texts(self, rows: dict[str, list[typing.Any]], height: int) -> list[typing.Any]:
        """What a mapper makes of the texts, by the method that Data-Juicer itself would call."""
        operator = self.operator
        if operator.is_batched_op():
            return list(operator.process_batched(rows)["text"])
        return [operator.process_single(one)["text"] for one in singles(rows, height)]


def singles(rows: dict[str, list[typing.Any]], height: int) -> list[dict[str, typing.Any]]:
    """The rows one by one."""
    return [{name: values[row] for name, values in rows.items()} for row in range(height)]


def arguments_of(found: type, base: typing.Any) -> set[str]:
    """Every argument that a class or one of its bases names."""
    names = set(base._BASE_PARAMS)
    for kind in found.__mro__:
        names |= set(getattr(kind, "_BASE_PARAMS", ()))
        if "__init__" in vars(kind) and kind is not object:
            parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
            names |= {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return names - {"self"}


def number(value: typing.Any) -> float | None:
    """A statistic as a finite number; None for anything else."""
    value = value.item() if hasattr(value, "item") else value
    return float(value) if isinstance(value, bool | int | float) and math.isfinite(value) else None


def described(error: BaseException) -> str:
    """`TypeName: first line`, in bounded length."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def write(pipe: typing.BinaryIO, head: dict[str, typing.Any], table: typing.Any = None) -> None:
    """One message."""
    text, body = json.dumps(head).encode(), b""
    if table is not None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        body = sink.getvalue().to_pybytes()
    pipe.write(struct.pack(">QQ", len(text), len(body)) + text + body)
    pipe.flush()


def read(pipe: typing.BinaryIO) -> tuple[dict[str, typing.Any], typing.Any] | None:
    """The next message; None when the other side is gone."""
    lengths = pipe.read(16)
    if len(lengths) < 16:
        return None
    text, body = struct.unpack(">QQ", lengths)
    head, data = json.loads(pipe.read(text)), pipe.read(body)
    return head, pa.ipc.open_stream(data).read_all() if body else None


def main() -> None:
    """Answer requests until standard input closes."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not mix with the replies
    guard = Guard()
    try:
        juicer = Juicer(guard)
        release = version("py-data-juicer")
    except (ImportError, PackageNotFoundError) as error:
        name = getattr(error, "name", None) or "py-data-juicer"
        write(replies, {"missing": name, "message": described(error)})
        return
    write(replies, {"ready": True, "release": release})
    while (message := read(sys.stdin.buffer)) is not None:
        request, table = message
        # The process ends itself a little after its time, so that it cannot outlive a parent that was killed.
        faulthandler.dump_traceback_later(request["timeout"] + _GRACE_SECONDS, exit=True, file=sys.stderr)
        if request["do"] == "open":
            head, result = juicer.open(request["key"], request["op"], request["args"], request["network"]), None
        else:
            head, result = juicer.run(request["key"], table.to_pydict(), request["stats"])
        faulthandler.cancel_dump_traceback_later()
        write(replies, head, result)


if __name__ == "__main__":
    main()
