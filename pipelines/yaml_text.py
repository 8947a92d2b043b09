"""YAML 1.2 text to plain data, with the line of every key and item.

The text is composed into nodes and turned into plain Python values here rather than by the library's constructor:
that is how both lines of a duplicate key, the line of every path and a bound on aliases are had, and why no tag can
ever build an object. Timestamps and the like stay text.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from buffer_engine.errors import ConfigError, Problem

PathParts = tuple[str | int, ...]
"""A place in the data: keys and list positions from the top."""

MAX_BYTES = 1_000_000
MAX_VALUES = 50_000
"""Values after aliases are expanded; nine nested aliases of nine would otherwise be a billion."""

_CORE = "tag:yaml.org,2002:"
_TOO_DEEP = "the YAML is nested too deeply to read"


@dataclass(frozen=True, slots=True)
class Document:
    """What a YAML file says.

    Attributes:
        data: plain mappings, lists and scalars; keys are text.
        lines: dotted path → 1-based line of its key (or of the list item); the empty path is the first line.
        text: the file as read.
        problems: keys written twice, tags and scalars that cannot be read; `data` has the first of two and null for
            what cannot be read.
    """

    data: dict[str, Any]
    lines: Mapping[str, int]
    text: str
    problems: tuple[Problem, ...] = ()


def dotted(path: PathParts) -> str:
    """`("operators", 2, "column")` as `operators.2.column`."""
    return ".".join(str(part) for part in path)


def read_document(file: Path) -> Document:
    """The mapping in a YAML file.

    Raises:
        ConfigError: the file is missing, not UTF-8, or not one YAML mapping.
    """
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        raise ConfigError([Problem("there is no such file", fix=_neighbours(file))], file=file) from None
    except IsADirectoryError:
        raise ConfigError(
            [Problem("this is a folder, not a file", fix="name the YAML file in it")], file=file
        ) from None
    except OSError as error:
        raise ConfigError([Problem(f"the file cannot be read: {error.strerror}")], file=file) from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(
            [Problem(f"byte {raw[error.start]:#04x} is not UTF-8", line=line, fix="save the file as UTF-8")], file=file
        ) from error
    return _document(text, file)


def parse_document(text: str, *, file: Path | None = None) -> Document:
    """The mapping in YAML `text`; `file` only names it in errors.

    Raises:
        ConfigError: it is not one YAML mapping, or has a key twice, a tag or a scalar that cannot be read; every
            problem found carries its line.
    """
    document = _document(text, file)
    if document.problems:
        raise ConfigError(document.problems, file=file)
    return document


def _document(text: str, file: Path | None) -> Document:
    if len(text) > MAX_BYTES:
        problem = Problem(f"{len(text):,} characters are too many for a specification (at most {MAX_BYTES:,})")
        raise ConfigError([problem], file=file)
    node = _compose(text, file=file)
    if node is None:
        raise ConfigError([Problem("the file is empty", line=1, fix="see docs/configuration.md")], file=file)
    if not isinstance(node, MappingNode):
        found = "a list" if isinstance(node, SequenceNode) else f"the single value {_shorten(node.value)}"
        problem = Problem(
            f"the top level must be a mapping of sections, found {found}",
            line=node.start_mark.line + 1,
            fix="start with `version: 1`",
        )
        raise ConfigError([problem], file=file)
    reader = _Reader()
    try:
        data = reader.mapping(node, ())
    except _TooManyValuesError:
        problem = Problem(
            f"aliases expand to more than {MAX_VALUES:,} values", line=1, fix="write fewer or smaller aliases"
        )
        raise ConfigError([problem], file=file) from None
    except RecursionError:
        raise ConfigError([Problem(_TOO_DEEP, line=1)], file=file) from None
    lines = {"": node.start_mark.line + 1} | reader.lines
    return Document(data=data, lines=lines, text=text, problems=tuple(reader.problems))


def parse_value(text: str) -> Any:
    """The value that `text` would have to the right of a colon in YAML: `0.1` is a number, `[a, b]` a list.

    Raises:
        ConfigError: it is not YAML.
    """
    node = _compose(text, file=None)
    if node is None:
        return None
    reader = _Reader()
    try:
        value = reader.value(node, ())
    except (_TooManyValuesError, RecursionError):
        raise ConfigError.one(_TOO_DEEP) from None
    if reader.problems:
        raise ConfigError(reader.problems)
    return value


def _compose(text: str, *, file: Path | None) -> Node | None:
    try:
        nodes = list(YAML(typ="safe", pure=True).compose_all(text))
    except MarkedYAMLError as error:
        # What is never closed is noticed at the end of the text; where it was opened says more.
        unclosed = "<stream end>" in str(error.problem) or "end of stream" in str(error.problem)
        mark = (error.context_mark if unclosed else None) or error.problem_mark or error.context_mark
        problem = Problem(
            f"this is not YAML: {_sentence(error)}",
            line=mark.line + 1 if mark is not None else None,
            fix=_syntax_fix(text, mark.line if mark is not None else None),
        )
        raise ConfigError([problem], file=file) from error
    except YAMLError as error:
        line = _line_of_unreadable(text)
        raise ConfigError([Problem(f"this is not YAML: {_first_line(error)}", line=line)], file=file) from error
    except RecursionError:
        raise ConfigError([Problem(_TOO_DEEP, line=1)], file=file) from None
    except (ValueError, TypeError, AttributeError, LookupError, AssertionError, NotImplementedError) as error:
        # The YAML library answers some malformed directives, tags and escapes with plain exceptions.
        raise ConfigError([Problem(f"this is not YAML: {_first_line(error)}", line=1)], file=file) from error
    if len(nodes) > 1:
        line = cast("Node", nodes[1]).start_mark.line + 1
        problem = Problem("the file holds several documents", line=line, fix="remove the `---` and what follows it")
        raise ConfigError([problem], file=file)
    return cast("Node | None", nodes[0]) if nodes else None


class _TooManyValuesError(Exception):
    """Aliases expand beyond `MAX_VALUES`."""


@dataclass(slots=True)
class _Reader:
    """Turns nodes into plain values and notes lines and problems on the way."""

    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    count: int = 0
    open_nodes: set[int] = field(default_factory=set)

    def value(self, node: Node, path: PathParts) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise _TooManyValuesError
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if id(node) in self.open_nodes:
            self._problem("an alias contains itself", node, path)
            return None
        if str(node.tag) not in {f"{_CORE}map", f"{_CORE}seq"}:
            self._problem(f"tag {str(node.tag)!r} is not supported", node, path, "remove the tag")
        self.open_nodes.add(id(node))
        try:
            if isinstance(node, MappingNode):
                return self.mapping(node, path)
            return self._sequence(cast("SequenceNode", node), path)
        finally:
            self.open_nodes.discard(id(node))

    def mapping(self, node: MappingNode, path: PathParts) -> dict[str, Any]:
        self.open_nodes.add(id(node))
        data: dict[str, Any] = {}
        seen: dict[str, int] = {}
        merged: list[Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == f"{_CORE}merge":
                merged.extend(value_node.value if isinstance(value_node, SequenceNode) else [value_node])
                continue
            key = self._key(key_node, path)
            if key is None:
                continue
            if key in seen:
                self.problems.append(
                    Problem(
                        f"key {key!r} is written twice: first in line {seen[key]}, again in line {line}",
                        path=dotted((*path, key)),
                        line=line,
                        fix="keep one of the two",
                    )
                )
                continue
            seen[key] = line
            self.lines.setdefault(dotted((*path, key)), line)
            data[key] = self.value(value_node, (*path, key))
        for source in merged:
            self._merge(source, data, path)
        return data

    def _merge(self, source: Node, data: dict[str, Any], path: PathParts) -> None:
        """`<<: *name` fills in keys that are not written out."""
        if not isinstance(source, MappingNode) or id(source) in self.open_nodes:
            self._problem("`<<` needs an alias of another mapping", source, path)
            return
        for key, value in self.value(source, path).items():
            data.setdefault(key, value)

    def _key(self, node: Node, path: PathParts) -> str | None:
        value = self._scalar(node, path) if isinstance(node, ScalarNode) else node.value
        if isinstance(value, str):
            return value
        shown = _shorten(node.value) if isinstance(node, ScalarNode) else "a list or mapping"
        self._problem(f"a key must be text, found {shown}", node, path, "put it in quotes")
        return None

    def _sequence(self, node: SequenceNode, path: PathParts) -> list[Any]:
        items: list[Any] = []
        for position, item in enumerate(node.value):
            self.lines.setdefault(dotted((*path, position)), item.start_mark.line + 1)
            items.append(self.value(item, (*path, position)))
        return items

    def _scalar(self, node: ScalarNode, path: PathParts) -> Any:
        tag, text = str(node.tag), str(node.value)
        kind = tag.removeprefix(_CORE)
        if not tag.startswith(_CORE) or kind not in _SCALARS:
            self._problem(f"tag {tag!r} is not supported", node, path, "write the value without a tag")
            return text
        try:
            return _SCALARS[kind](text)
        except (ValueError, OverflowError):
            self._problem(f"{_shorten(text)} cannot be read as {kind}", node, path, "put it in quotes if it is text")
            return None

    def _problem(self, message: str, node: Node, path: PathParts, fix: str = "") -> None:
        self.problems.append(Problem(message, path=dotted(path), line=node.start_mark.line + 1, fix=fix))


def _integer(text: str) -> int:
    plain = text.replace("_", "")
    unsigned = plain.lstrip("+-")
    for prefix, base in (("0x", 16), ("0o", 8), ("0b", 2)):
        if unsigned.lower().startswith(prefix):
            return int(plain, base)
    return int(plain)


def _real(text: str) -> float:
    return float(text.replace("_", "").replace(".inf", "inf").replace(".Inf", "inf").replace(".INF", "inf").lower()
                 .replace(".nan", "nan"))  # fmt: skip


def _boolean(text: str) -> bool:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    raise ValueError(text)


_SCALARS: Mapping[str, Any] = {
    "int": _integer,
    "float": _real,
    "bool": _boolean,
    "null": lambda text: None,
    "str": str,
    "timestamp": str,
}


def _sentence(error: MarkedYAMLError) -> str:
    parts = [str(part).strip() for part in (error.context, error.problem) if part]
    return _shorten_text(", ".join(parts)) or "it cannot be parsed"


def _first_line(error: Exception) -> str:
    return _shorten_text(str(error).strip().split("\n", 1)[0]) or type(error).__name__


def _syntax_fix(text: str, line: int | None) -> str:
    rows = text.split("\n")
    if line is None:
        return ""
    # A tab is reported at the token after it or on the following line, so both are looked at.
    for row in rows[max(line - 1, 0) : line + 1]:
        if re.match(r"^\s*\t", row):
            return "indent with spaces, not tabs"
    return "check the indentation, and that brackets and quotes are closed"


def _line_of_unreadable(text: str) -> int:
    found = re.search(r"[^\x09\x0A\x0D\x20-\x7E\x85\xA0-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]", text)
    return text[: found.start()].count("\n") + 1 if found else 1


def _shorten(value: Hashable) -> str:
    return _shorten_text(repr(value))


def _shorten_text(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}…"


def _neighbours(file: Path) -> str:
    folder = file.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist either"
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in {".yaml", ".yml"})
    return "YAML files there: " + ", ".join(names[:8]) if names else f"there is no YAML file in {folder.resolve()}"
