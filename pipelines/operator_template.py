"""A new operator with its test, as files to begin from.

In a checkout of this repository all five places of the recipe in `docs/operators.md` are written; elsewhere two files
and the entry point to add.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from buffer_engine.errors import UsageError

Family = Literal["clean", "format", "filter", "score", "reward", "dedup", "group", "augment", "select"]
FAMILIES: tuple[Family, ...] = get_args(Family)
"""Folders of operators; each says what its operators do."""

_HEAD = '''"""NAME: say in a few words what it finds."""

from __future__ import annotations

IMPORTS
'''

_MEND = (
    _HEAD
    + '''from operators.mending import MendConfig, Mender


class CLASSConfig(MendConfig):
    """What is mended."""

    old: str = Field("colour", min_length=1, description="text that is replaced")
    new: str = Field("color", description="text that stands there afterwards")


class CLASS(Mender[CLASSConfig]):
    """Replaces `old` by `new` in the columns, for the operators after it.

    Null stays null. With `rewrite: true` imported text rows are replaced (`replaced`); sampled rows never change.
    """

    Config = CLASSConfig

    def mend(self, texts: pl.Series) -> pl.Series:
        """Replace."""
        text = pl.col("text").str.replace_all(self.config.old, self.config.new, literal=True)
        return texts.to_frame("text").select(text).to_series()
'''
)

_FILTER = (
    _HEAD
    + '''from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of


class CLASSConfig(OperatorConfig):
    """How much is too much."""

    column: str = Field("response", description="text column")
    most: int = Field(3, ge=0, description="exclamation marks that are still fine")


class CLASS(Operator[CLASSConfig]):
    """Rejects texts with more than `most` exclamation marks, with the reason `loud` and their number as detail.

    A null text is rejected with reason `null`.
    """

    Config = CLASSConfig

    def contract(self) -> Contract:
        """Reads the column; rejects."""
        return Contract(reads=frozenset((self.config.column,)),SCOPE drops=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Count exclamation marks."""
        count = pl.col(self.config.column).str.count_matches("!", literal=True)
        reason = pl.when(count.is_null()).then(pl.lit("null")).when(count > self.config.most).then(pl.lit("loud"))
        detail = pl.format("{} marks > {}", count, pl.lit(self.config.most))
        return Result(verdicts=verdicts_of(frame, "reject", reason, detail=detail))
'''
)

_SCORE = (
    _HEAD
    + '''from operators.base import Context, Contract, Operator, Result, ScoreOperatorConfig


class CLASSConfig(ScoreOperatorConfig):
    """What is measured."""

    column: str = Field("response", description="text column")


class CLASS(Operator[CLASSConfig]):
    """Scores 1 where the text has a question mark, else 0; a null text cannot be scored."""

    Config = CLASSConfig

    def contract(self) -> Contract:
        """Reads the column; scores its own component."""
        return Contract(reads=frozenset((self.config.column,)), scores=(self.config.name,)SHAPES)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Look for question marks."""
        asks = pl.col(self.config.column).str.contains("?", literal=True).cast(pl.Float64)
        return Result(scores={self.config.name: frame.select(asks.alias(self.config.name)).to_series()})
'''
)

_GROUP = (
    _HEAD
    + '''from operators.base import Context, Contract, Operator, OperatorConfig, Result
from operators.verdicts import verdicts_of


class CLASSConfig(OperatorConfig):
    """How different answers must be."""

    least: int = Field(2, ge=1, description="fewest different answers that a group needs")


class CLASS(Operator[CLASSConfig]):
    """Rejects whole groups with fewer than `least` different answers (`alike`); null counts as an answer."""

    Config = CLASSConfig

    def contract(self) -> Contract:
        """Reads the answers; needs whole groups; rejects."""
        return Contract(reads=frozenset(("response",)), scope="group", drops=True)

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Count the answers of every group."""
        answers = pl.col("response").n_unique().over("group_id")
        reason = pl.when(answers < self.config.least).then(pl.lit("alike"))
        detail = pl.format("{} different answers", answers)
        return Result(verdicts=verdicts_of(frame, "reject", reason, detail=detail))
'''
)

_AUGMENT = (
    _HEAD
    + '''from operators.base import Context, Contract, Operator, OperatorConfig, Result


class CLASSConfig(OperatorConfig):
    """What is added to a prompt."""

    suffix: str = Field(" Think first.", min_length=1, description="text that is put behind the last user message")


class CLASS(Operator[CLASSConfig]):
    """Adds to every imported dialogue a copy whose last user message ends with `suffix`; the old row stays.

    Copies are text that nobody sampled. Rows of a model, rows that this operator made, and dialogues without a user
    message get no copy.
    """

    Config = CLASSConfig

    def contract(self) -> Contract:
        """Reads dialogues and their origin; adds rows."""
        return Contract(reads=frozenset(("messages", "made_by")), adds=True, cost="python")

    def apply(self, frame: pl.DataFrame, context: Context) -> Result:
        """Write the copies."""
        parents: list[int] = []
        copies: list[list[dict[str, object]]] = []
        # A Python loop over the rows that get a copy.
        for row in (frame["made_by"] == "import").arg_true():
            messages = [dict(message) for message in frame["messages"][row]]
            users = [message for message in messages if message["role"] == "user"]
            if users:
                users[-1]["content"] = f"{users[-1]['content'] or ''}{self.config.suffix}"
                parents.append(row)
                copies.append(messages)
        schema = {"parent": pl.UInt32(), "messages": frame.schema["messages"]}
        return Result(added=pl.DataFrame({"parent": parents, "messages": copies}, schema=schema))
'''
)

_OPERATORS: Mapping[Family, str] = {
    "clean": _MEND,
    "format": _SCORE.replace("SHAPES", ""),
    "filter": _FILTER.replace(",SCOPE", ","),
    "score": _SCORE.replace("SHAPES", ""),
    "reward": _SCORE.replace("SHAPES", ", shapes=True"),
    "dedup": _FILTER.replace(",SCOPE", ', scope="frame",'),
    "group": _GROUP,
    "augment": _AUGMENT,
    "select": _FILTER.replace(",SCOPE", ', scope="frame",'),
}

_TEST_HEAD = '''"""NAME on rows small enough to work out by hand."""

from __future__ import annotations

IMPORTS
from MODULE import CLASS, CLASSConfig
from operators.base import Context
from operators.testing import check_operator, hostile_frame, sample_frame

CONTEXT = Context(seed=1, model_version=1, step=1)


def test_NAME_keeps_the_contract_of_operators():
    check_operator(CLASS, CLASSConfig(type="TYPE"))
    check_operator(CLASS, CLASSConfig(type="TYPE"), hostile_frame())


'''

_TESTS: Mapping[Family, str] = {
    "clean": """def test_NAME_mends_what_it_should_and_nothing_else():
    rows = sample_frame().head(3).with_columns(response=pl.Series(["a colour", "color", None]))
    result = CLASS(CLASSConfig(type="TYPE", columns=("response",))).apply(rows, CONTEXT)
    assert result.columns["response"].to_list() == ["a color", "color", None]
""",
    "filter": """def test_NAME_rejects_with_a_reason():
    rows = sample_frame().head(3).with_columns(response=pl.Series(["!!", "!!!", None]))
    result = CLASS(CLASSConfig(type="TYPE", most=2)).apply(rows, CONTEXT)
    assert result.verdicts is not None
    assert result.verdicts.rows() == [(1, "reject", "loud", "3 marks > 2", None), (2, "reject", "null", None, None)]
""",
    "score": """def test_NAME_scores_and_leaves_open_what_it_cannot_know():
    rows = sample_frame().head(3).with_columns(response=pl.Series(["why?", "so", None]))
    result = CLASS(CLASSConfig(type="TYPE", id="asks")).apply(rows, CONTEXT)
    assert result.scores["asks"].to_list() == [1.0, 0.0, None]
""",
    "group": """def test_NAME_judges_whole_groups():
    rows = sample_frame().head(4).with_columns(response=pl.Series(["a", "a", "a", "b"]))
    rows = rows.with_columns(group_id=pl.Series(["g", "g", "h", "h"]))
    result = CLASS(CLASSConfig(type="TYPE")).apply(rows, CONTEXT)
    assert result.verdicts is not None
    assert result.verdicts.select("row", "reason", "detail").rows() == [
        (0, "alike", "1 different answers"),
        (1, "alike", "1 different answers"),
    ]
""",
    "augment": """def test_NAME_copies_imported_dialogues_only():
    rows = sample_frame().head(2).with_columns(made_by=pl.Series(["explorer", "import"]))
    result = CLASS(CLASSConfig(type="TYPE", suffix="!")).apply(rows, CONTEXT)
    assert result.added is not None
    assert result.added["parent"].to_list() == [1]
    assert [message["content"] for message in result.added["messages"][0]] == ["2+1?!", ""]
""",
}
_TEST_OF: Mapping[Family, Family] = {
    "format": "score", "reward": "score", "dedup": "filter", "select": "filter",
}  # fmt: skip


def class_name(name: str) -> str:
    """`loud_filter` → `LoudFilter`."""
    return "".join(part.capitalize() for part in name.split("_"))


def new_operator(name: str, family: str, *, into: Path | None, root: Path) -> str:
    """Write a new operator; what was written and what is left to do, as text.

    Args:
        name: of the operator: small letters, digits and underscores.
        family: one of `FAMILIES`.
        into: folder for a plug-in's two files; None: `root` is a checkout of this repository.
    Raises:
        UsageError: the name or family is none, a file is there already, or `root` is no checkout.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise UsageError(f"{name!r} is no name for an operator → small letters, digits and underscores: loud_filter")
    if family not in FAMILIES:
        raise UsageError(f"--kind {family!r} is no family of operators → {', '.join(FAMILIES)}")
    if into is not None:
        return _plugin(name, family, into)
    if not all((root / place).is_file() for place in ("operators/registry.py", "docs/operators.md")):
        raise UsageError(f"{root} is no checkout of buffer-engine → name a folder for a plug-in: --into FOLDER")
    return _in_checkout(name, family, root)


def _plugin(name: str, family: Family, into: Path) -> str:
    package = into.name if re.fullmatch(r"[A-Za-z_]\w*", into.name) else "mine"
    test = _test(name, family, name, f"{package}.{name}", checkout=False)
    files = {into / f"{name}.py": _source(name, family, checkout=False), into / f"test_{name}.py": test}
    _write(files)
    return (
        f"{_listed(files)}\nTry it: python -m pytest {into}\nMake it known to specifications, in its pyproject.toml:\n"
        '  [project.entry-points."buffer_engine.operators"]\n'
        f'  "{package}.{name}" = "{package}.{name}:{class_name(name)}"'
    )


def _in_checkout(name: str, family: Family, root: Path) -> str:
    module = f"operators.{family}.{name}"
    registry, page = root / "operators" / "registry.py", root / "docs" / "operators.md"
    cases = root / "tests" / "operators" / "test_operator_contract.py"
    texts = {path: path.read_text(encoding="utf-8") for path in (registry, page, cases)}
    if f'"{name}":' in texts[registry]:
        raise UsageError(f"there is an operator {name!r} already → choose another name")
    files = {
        root / "operators" / family / f"{name}.py": _source(name, family, checkout=True),
        root / "tests" / "operators" / f"test_{name}.py": _test(name, family, module, name, checkout=True),
    }
    changed = {
        registry: _before(texts[registry], "    },\n)", f'        "{name}": "{module}:{class_name(name)}",\n'),
        page: _after_table(texts[page], f"| `{name}` | says what it does | and in a few words how |\n"),
        cases: _before(texts[cases], "]  # fmt: skip\n\n\ndef operator(", f'    ("{name}", {{}}),\n'),
    }
    _write(files)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    return (
        f"{_listed([*files, *changed])}\nTry it: python -m pytest tests/operators/test_{name}.py\n"
        "Then write what it does, its row in docs/operators.md, and run `python -m pipelines.reference docs`."
    )


def _source(name: str, family: Family, *, checkout: bool) -> str:
    text = _with_imports(_OPERATORS[family], ("from pydantic import Field",), checkout=checkout)
    if "Field(" not in text:
        text = text.replace("from pydantic import Field\n", "")
    return _named(text, {"NAME": name, "CLASS": class_name(name)})


def _test(name: str, family: Family, module: str, type_name: str, *, checkout: bool) -> str:
    text = (_TEST_HEAD + _TESTS[_TEST_OF.get(family, family)]).replace("MODULE", module)
    text = _with_imports(text, (), checkout=checkout)
    return _named(text, {"NAME": name, "CLASS": class_name(name), "TYPE": type_name})


def _named(text: str, names: Mapping[str, str]) -> str:
    for word, value in names.items():
        text = text.replace(word, value)
    return text


def _with_imports(text: str, more: Sequence[str], *, checkout: bool) -> str:
    """The text with its imports in order: in a plug-in `operators` is someone else's package, here it is our own."""
    head, _, rest = text.partition("IMPORTS\n")
    lines = rest.splitlines()
    given = [line for line in lines if line.startswith("from ")]
    body = "\n".join(line for line in lines if not line.startswith("from ")).strip("\n")
    others, ours = list(more), [line for line in given if line.startswith("from operators.")]
    own = [line for line in given if line not in ours]
    if not checkout:
        others, ours = [*others, *ours], own
    blocks = ["\n".join(("import polars as pl", *sorted(others))), "\n".join(sorted(ours))]
    gap = "\n\n" if body.startswith("CONTEXT") else "\n\n\n"
    return head + "\n\n".join(block for block in blocks if block) + gap + body + "\n"


def _before(text: str, anchor: str, line: str) -> str:
    if text.count(anchor) != 1:
        raise UsageError(f"no place to write {line.strip()!r} was found → write it by hand")
    return text.replace(anchor, line + anchor)


def _after_table(page: str, row: str) -> str:
    start = page.index("## Shipped operators")
    section = page[start:].split("\n## ")[0] + "\n"  # tables of later sections have rows of this form too
    rows = list(re.finditer(r"^\| `\w+` \|.*\n", section, re.MULTILINE))
    end = start + rows[-1].end()
    return page[:end] + row + page[end:]


def _write(files: Mapping[Path, str]) -> None:
    for path in files:
        if path.exists():
            raise UsageError(f"{path} is there already → choose another name, or move it away")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _listed(paths: Iterable[Path]) -> str:
    return "\n".join(f"wrote {path}" for path in paths)
