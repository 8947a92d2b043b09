"""Polars expressions as a person writes them, read without running Python.

`pl.col("a").str.len_chars() > 3` is parsed and built call by call out of names that are known to be harmless: nothing
is imported, no attribute with an underscore exists, and what would run a function of Python is not in the list. Which
names there are depends on the scope: an expression on one row must not look at others.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal

import polars as pl

Scope = Literal["row", "group", "frame"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ROOTS: Mapping[str, Callable[..., Any]] = {
    name: getattr(pl, name)
    for name in (
        "col", "lit", "when", "element", "coalesce", "concat_str", "format", "struct", "concat_list", "sum_horizontal",
        "min_horizontal", "max_horizontal", "mean_horizontal", "any_horizontal", "all_horizontal",
    )
}  # fmt: skip
_TYPES: Mapping[str, Any] = {
    name: getattr(pl, name) for name in ("String", "Int32", "Int64", "Float32", "Float64", "Boolean")
}
_EACH_ROW = _names(
    "abs add alias and_ arctan cast ceil clip cos eq eq_missing exp fill_nan fill_null floor floordiv ge "
    "gt is_between is_close is_finite is_in is_infinite is_nan is_not_nan is_not_null is_null le log "
    "log10 log1p lt mod mul ne ne_missing neg not_ or_ otherwise pow replace replace_strict round "
    "round_sig_figs sign sin sqrt sub tan tanh then truediv when xor"
)
_ACROSS = _names(
    "all any arg_max arg_min argsort count cum_count cum_max cum_min cum_sum diff first is_duplicated "
    "is_first_distinct is_last_distinct is_unique last len max mean median min mode n_unique null_count "
    "pct_change product quantile rank shift skew kurtosis sort sort_by std sum var drop_nulls drop_nans "
    "filter unique over"
)
_NAMESPACES: Mapping[str, frozenset[str]] = {
    "str": _names(
        "contains contains_any count_matches ends_with extract extract_all extract_groups extract_many "
        "find head find_many json_decode json_path_match len_bytes len_chars normalize pad_end pad_start "
        "replace replace_all replace_many reverse slice split split_exact splitn starts_with strip_chars "
        "strip_chars_end strip_chars_start strip_prefix strip_suffix tail to_decimal to_integer to_lowercase "
        "to_uppercase zfill"
    ),
    "list": _names(
        "all any arg_max arg_min contains count_matches concat diff drop_nulls eval filter first gather "
        "gather_every get head item join last len max mean median min n_unique reverse set_difference "
        "set_intersection set_union shift slice sort std sum tail unique var"
    ),
    "struct": frozenset(["field"]),
}
_BINARY: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_UNARY: Mapping[type[ast.AST], Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert
}  # fmt: skip


def polars_expression(text: str, scope: Scope = "row") -> pl.Expr:
    """The expression that `text` describes.

    Raises:
        ValueError: it is no Python expression, uses a name that is not known here, or is no Polars expression.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a Polars expression: {error}") from error
    try:
        built = _Builder(scope).build(tree.body)
    except (pl.exceptions.PolarsError, TypeError, ArithmeticError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a Polars expression: {error}") from error
    if not isinstance(built, pl.Expr):
        raise ValueError(f"gives {type(built).__name__}, not a Polars expression: begin with pl.col(…) or pl.lit(…)")
    return built


class _Builder:
    def __init__(self, scope: Scope) -> None:
        self._names = _EACH_ROW if scope == "row" else _EACH_ROW | _ACROSS
        self._scope = scope
        # Inside `list.eval` the elements of one row are what an expression goes over.
        self._inside = False

    def build(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self.build(part) for part in node.elts]
        if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
            return {
                self.build(key): self.build(value) for key, value in zip(node.keys, node.values, strict=True) if key
            }
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return self._combined(node.op, self.build(node.left), self.build(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return _UNARY[type(node.op)](self.build(node.operand))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _BINARY:
            return _BINARY[type(node.ops[0])](self.build(node.left), self.build(node.comparators[0]))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pl":
            if node.attr in _TYPES:
                return _TYPES[node.attr]
            raise ValueError(f"pl.{node.attr} is not known here; types: {', '.join(_TYPES)}")
        if isinstance(node, ast.Call):
            return self._called(node)
        raise ValueError(f"{ast.unparse(node)!r} is not known here: use pl functions, methods, numbers and text")

    def _combined(self, sign: ast.operator, left: Any, right: Any) -> Any:
        plain = not (isinstance(left, pl.Expr) or isinstance(right, pl.Expr))
        if plain and not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise ValueError("only numbers and expressions are calculated with")
        if plain and isinstance(sign, ast.Pow):
            raise ValueError("write a power of two numbers as a number")
        return _BINARY[type(sign)](left, right)

    def _called(self, node: ast.Call) -> Any:
        function = self._function(node.func)
        keywords = {word.arg: word.value for word in node.keywords if word.arg is not None}
        if len(keywords) != len(node.keywords) or any(isinstance(part, ast.Starred) for part in node.args):
            raise ValueError("* and ** are not known here")
        self._refuse_neighbours(node, keywords)
        inside, self._inside = self._inside, self._inside or self._opens(node.func)
        try:
            return function(
                *(self.build(part) for part in node.args), **{name: self.build(part) for name, part in keywords.items()}
            )
        finally:
            self._inside = inside

    def _refuse_neighbours(self, node: ast.Call, keywords: Mapping[str, ast.AST]) -> None:
        """What looks at other rows by its arguments rather than by its name."""
        if self._scope != "row" or self._inside or not isinstance(node.func, ast.Attribute):
            return
        if node.func.attr == "fill_null" and (len(node.args) != 1 or keywords):
            raise ValueError("fill_null with a strategy looks at other rows: give it a value")
        if node.func.attr == "is_in" and not all(isinstance(part, ast.List | ast.Tuple) for part in node.args):
            raise ValueError("is_in looks at a whole column: give it a list of values")

    @staticmethod
    def _opens(node: ast.AST) -> bool:
        """Whether a call is `….list.eval` or `….list.filter`."""
        return (
            isinstance(node, ast.Attribute)
            and node.attr in ("eval", "filter")
            and isinstance(node.value, ast.Attribute)
            and node.value.attr == "list"
        )

    def _function(self, node: ast.AST) -> Callable[..., Any]:
        if not isinstance(node, ast.Attribute):
            raise ValueError(f"{ast.unparse(node)!r} cannot be called here")
        if isinstance(node.value, ast.Name) and node.value.id == "pl":
            if node.attr not in _ROOTS:
                raise ValueError(f"pl.{node.attr} is not known here; known: {', '.join(_ROOTS)}")
            return _ROOTS[node.attr]
        if isinstance(node.value, ast.Attribute) and node.value.attr in _NAMESPACES:
            space = node.value.attr
            if node.attr not in _NAMESPACES[space]:
                raise ValueError(f".{space}.{node.attr} is not known here")
            return getattr(getattr(self.build(node.value.value), space), node.attr)
        if node.attr in _ACROSS and self._scope == "row" and not self._inside:
            raise ValueError(f".{node.attr} looks at other rows, but this is evaluated on each row alone: set `scope`")
        if node.attr not in (self._names | _ACROSS if self._inside else self._names):
            raise ValueError(f".{node.attr} is not known here")
        target = self.build(node.value)
        if isinstance(target, str | int | float | list | dict | None):
            raise ValueError(f"{ast.unparse(node.value)!r} is no expression: write pl.lit(…)")
        return getattr(target, node.attr)
