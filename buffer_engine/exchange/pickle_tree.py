"""What a pickle says, without doing what it says.

A pickle is a program: loading one runs whatever its author named. Here its opcodes are only written down. Numbers,
text, lists and dicts come out as themselves; a class becomes a `Name`, a call a `Made` that nobody carries out. Nothing
is imported and nothing is called, whatever the bytes are. An opcode that is not known here ends the reading.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, cast

MOST_VALUES = 1_000_000
"""A few bytes can refer to one list over and over; a tree that unfolds to more values than this is refused.

64 characters of text count like a value.
"""
DEEPEST = 64


class UnreadablePickle(ValueError):
    """The bytes are no pickle, or one that holds more than plain values; says what."""


@dataclass(frozen=True, slots=True)
class Name:
    """Something that the pickle refers to by module and name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Made:
    """What calling `what` with `args` would give, and the state it would be given."""

    what: Any
    args: Any
    state: Any = None


@dataclass(frozen=True, slots=True)
class Kept:
    """An object that the pickle leaves to a place outside, by an id."""

    key: Any


_MARK = object()
_CONSTANTS: Mapping[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    {
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
        "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
        "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8",
    }
)  # fmt: skip
_EMPTY = {"EMPTY_LIST": list[Any], "EMPTY_DICT": dict[Any, Any], "EMPTY_TUPLE": tuple[Any, ...], "EMPTY_SET": list[Any]}


def read_tree(data: bytes | BytesIO) -> Any:
    """The tree of one pickle; of a stream the next one, which is left where that ends.

    Sets come as lists.

    Raises:
        UnreadablePickle: it is cut short, no pickle, or uses an opcode that is not known here.
    """
    stream = BytesIO(data) if isinstance(data, bytes) else data
    walker = _Walker()
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name == "STOP":
                return walker.result()
            walker.step(opcode.name, argument)
    except UnreadablePickle:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise UnreadablePickle(f"not a sound pickle ({error})") from error
    raise UnreadablePickle("the pickle is cut short")


def plain(tree: Any, *, known: Callable[[Made], Any] = lambda made: made) -> Any:
    """The tree, when it holds nothing but None, bool, int, float, str, bytes, lists, tuples and dicts.

    Args:
        known: gives the plain value that a call stands for, or the call itself when that is not known.
    Raises:
        UnreadablePickle: it names a class or a function, refers to itself, or unfolds to too much.
    """
    left = [MOST_VALUES]

    def unfold(value: Any, depth: int) -> Any:
        left[0] -= 1 + (len(value) >> 6 if isinstance(value, str | bytes | bytearray) else 0)
        if left[0] < 0 or depth > DEEPEST:
            raise UnreadablePickle(f"it unfolds to more than {MOST_VALUES} values or deeper than {DEEPEST}")
        if isinstance(value, Name):
            raise UnreadablePickle(f"it refers to {value}, which only running it would make a value")
        if isinstance(value, Made):
            value = known(value)
        if isinstance(value, Made):
            raise UnreadablePickle(f"it makes an object of {named(value.what)}, which only running it would do")
        if isinstance(value, Kept):
            raise UnreadablePickle("it refers to an object outside")
        if isinstance(value, dict):
            pairs = cast("dict[Any, Any]", value).items()
            return {unfold(key, depth + 1): unfold(one, depth + 1) for key, one in pairs}
        if isinstance(value, list):
            return [unfold(one, depth + 1) for one in cast("list[Any]", value)]
        if isinstance(value, tuple):
            return tuple(unfold(one, depth + 1) for one in cast("tuple[Any, ...]", value))
        return value

    return unfold(tree, 0)


def named(what: Any) -> str:
    """What is called, for a message; text of anything but a name could be endless."""
    return str(what) if isinstance(what, Name) else f"something that is no name ({type(what).__name__})"


class _Walker:
    """The stack machine of a pickle, with no machine behind it."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        """What is left on the stack when the pickle stops."""
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise UnreadablePickle("not a sound pickle (it ends with another stack than one value)")
        return self._stack[0]

    def step(self, name: str, argument: Any) -> None:
        """Take one opcode into account."""
        stack = self._stack
        if name in ("PROTO", "FRAME"):
            return
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._top()
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(reversed([self._pop() for _ in range(int(name[-1]))])))
        elif name in ("TUPLE", "LIST", "FROZENSET", "DICT"):
            items = self._to_mark()
            stack.append(tuple(items) if name == "TUPLE" else dict(_pairs(items)) if name == "DICT" else items)
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            items = [self._pop()] if name == "APPEND" else self._to_mark()
            self._of(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [self._pop(), self._pop()][::-1] if name == "SETITEM" else self._to_mark()
            self._set(items)
        elif name == "POP":
            self._stack.pop()
        elif name == "POP_MARK":
            self._to_mark()
        elif name == "DUP":
            stack.append(self._top())
        else:
            self._symbol(name, argument)

    def _symbol(self, name: str, argument: Any) -> None:
        """Opcodes that would run something: written down instead."""
        stack = self._stack
        if name == "GLOBAL":
            module, _, attribute = str(argument).partition(" ")
            stack.append(Name(module, attribute))
        elif name == "STACK_GLOBAL":
            attribute, module = self._pop(), self._pop()
            if not isinstance(module, str) or not isinstance(attribute, str):
                raise UnreadablePickle("not a sound pickle (a name that is no text)")
            stack.append(Name(module, attribute))
        elif name in ("REDUCE", "NEWOBJ"):
            args, what = self._pop(), self._pop()
            stack.append(Made(what, args))
        elif name == "BUILD":
            state, made = self._pop(), self._top()
            if not isinstance(made, Made):
                raise UnreadablePickle("not a sound pickle (state for a plain value)")
            made.state = state
        elif name == "BINPERSID":
            stack.append(Kept(self._pop()))
        else:
            raise UnreadablePickle(f"it uses opcode {name}, which plain values do not need")

    def _set(self, items: list[Any]) -> None:
        target = self._top()
        if isinstance(target, Made):  # items of a dict subclass, which nothing here needs
            return
        self._of(dict).update(_pairs(items))

    def _of(self, kind: type) -> Any:
        if not isinstance(self._top(), kind):
            raise UnreadablePickle(f"not a sound pickle (a {kind.__name__} was expected)")
        return self._top()

    def _top(self) -> Any:
        if self._stack[-1] is _MARK:
            raise UnreadablePickle("not a sound pickle (a mark where a value should be)")
        return self._stack[-1]

    def _pop(self) -> Any:
        value = self._top()
        self._stack.pop()
        return value

    def _to_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise UnreadablePickle("not a sound pickle (no mark)")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    if len(items) % 2:
        raise UnreadablePickle("not a sound pickle (a key without a value)")
    keys = items[::2]
    for key in keys:
        # a tuple could take for ever to hash: it may hold one tuple many times over
        if not isinstance(key, str | int | float | bytes | bool | None):
            raise UnreadablePickle("a key that is neither text nor a number")
    return list(zip(keys, items[1::2], strict=True))
