"""Every error that a user can meet, in one tree, so that the command line can map each to an exit code and a sentence.

A message says what was wrong, where, what was there, and what to do. Wording lives in the named constructors here or
beside the code that raises; nothing is logged and then ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class BufferEngineError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line returns for it."""

    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding about a configuration: where it is and how to mend it.

    Attributes:
        message: what is wrong and what was found.
        path: dotted path in the YAML, e.g. `operators.2.column`.
        fix: what to write instead; empty when nothing can be suggested.
        line: 1-based line in the file; None when the value did not come from a file.
    """

    message: str
    path: str = ""
    fix: str = ""
    line: int | None = None

    def render(self, file: Path | None = None) -> str:
        """`file:line: path: message (fix)`."""
        where = ":".join(str(part) for part in (file, self.line) if part is not None)
        head = ": ".join(part for part in (where, self.path) if part)
        tail = f" → {self.fix}" if self.fix else ""
        return f"{head}: {self.message}{tail}" if head else f"{self.message}{tail}"


class ConfigError(BufferEngineError):
    """The configuration cannot be used; carries every problem found, not only the first."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem], *, file: Path | None = None) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.file = file
        super().__init__("\n".join(problem.render(file) for problem in self.problems))

    @classmethod
    def one(cls, message: str, *, path: str = "", fix: str = "") -> ConfigError:
        """A configuration error with a single problem."""
        return cls([Problem(message, path=path, fix=fix)])


class UsageError(BufferEngineError):
    """The command line was used wrongly (unknown run, missing file, conflicting flags)."""

    exit_code = 2


class UnknownComponentError(ConfigError):
    """A `type:` names nothing in its registry."""

    @classmethod
    def named(cls, kind: str, name: str, known: Iterable[str]) -> UnknownComponentError:
        """`unknown operator 'lenght_filter' → did you mean 'length_filter'?`"""
        return cls([Problem(f"unknown {kind} {name!r}", fix=did_you_mean(name, known))])


class MissingExtraError(BufferEngineError):
    """An optional dependency is not installed; the message carries the exact install line."""

    exit_code = 3

    @classmethod
    def of(cls, module: str, extra: str) -> MissingExtraError:
        """The error for a module that extra `extra` would have brought."""
        return cls(f"this needs the package {module!r}, which is not installed: pip install 'buffer-engine[{extra}]'")


class SchemaError(BufferEngineError):
    """Rows do not fit their table; names the key, the field and both values."""


class RowError(SchemaError):
    """One row does not fit its table; the others of the append may.

    Attributes:
        label: the row's key as messages write it, or its number where the key is missing.
        has_key: whether `label` is the key.
        field: the column.
        reason: what is wrong with it, with the value.
    """

    def __init__(self, message: str, *, label: str, has_key: bool, field: str, reason: str) -> None:
        self.label = label
        self.has_key = has_key
        self.field = field
        self.reason = reason
        super().__init__(message)


class StoreError(BufferEngineError):
    """The store cannot do what was asked."""


class StoreVersionError(StoreError):
    """The store was written by a newer (or an unmigratable older) version of this package."""


class CorruptSegmentError(StoreError):
    """Stored bytes do not match their checksum; `frame_id` is the damaged frame's, None when it is not known."""

    def __init__(self, message: str, *, frame_id: int | None = None) -> None:
        self.frame_id = frame_id
        super().__init__(message)


class DamagedRowsWarning(UserWarning):
    """Rows were left out of a read because their frame is damaged; said once per frame and open store."""


class KeyConflictError(StoreError):
    """A row with this key is already stored with other content.

    Attributes:
        label: the key, as messages write it.
        field: first column that differs.
        reason: what it is there and here.
    """

    def __init__(self, message: str, *, label: str = "", field: str = "", reason: str = "") -> None:
        self.label = label
        self.field = field
        self.reason = reason
        super().__init__(message)


class StoreBusyError(StoreError):
    """Another process holds what only one may hold (a run's name, a writer's log)."""


class StoreFullError(StoreError):
    """As many rollouts wait to be trained as the store may hold, and none left in time; nothing was dropped."""


class PartitionError(StoreError):
    """Training and evaluation partitions would mix."""


class ExchangeError(BufferEngineError):
    """Rows cannot be written to or taken from a file; names file, row and field."""


class OperatorError(BufferEngineError):
    """An operator failed; names the operator, the row and the cause."""


class ConservationError(OperatorError):
    """An operator lost, doubled or invented rows."""


class StarvedError(BufferEngineError):
    """Filters left no batch even after the stated number of refills; carries counts per operator and reason."""


class RolloutError(BufferEngineError):
    """One attempt failed; the explorer turns it into a row and never lets it escape."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


class ModelError(BufferEngineError):
    """A model folder is missing, incomplete or cannot be loaded."""


class TasksetError(BufferEngineError):
    """A task source is missing, empty, or lacks a column that was asked for."""


class TrainingError(BufferEngineError):
    """A training step cannot go on."""


class NonFiniteLossError(TrainingError):
    """Loss or gradient is NaN or infinite; the message names the batch."""


class RowTooLongError(TrainingError):
    """A row has more tokens than the budget or the context; nothing is truncated."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint with the nearest known name, or the list of all when nothing is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.55)
    if near:
        return f"did you mean {near[0]!r}?"
    return "known: " + ", ".join(names) if names else "nothing is registered"
