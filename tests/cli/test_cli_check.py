"""`check`, `operators`, `schema` and `doctor` as a person calls them."""

from __future__ import annotations

import re
import textwrap
import tomllib
from pathlib import Path

import pytest
from config_sample import write_sample
from test_cli_frame import facts_of, in_a_new_process

from buffer_engine.schema import TABLES
from explorers.registry import TASKSETS
from operators.registry import OPERATORS
from pipelines.cli.main import run_command
from pipelines.diagnosis import EXTRAS, declared_extras, installed
from pipelines.findings import as_written
from pipelines.load import load_spec
from pipelines.reference import DOCUMENTED_TABLES


def test_a_sound_file_gives_a_summary_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["check", str(write_sample(tmp_path))]) == 0

    captured = capsys.readouterr()
    assert "explore → curate → train" in captured.out
    assert captured.err == ""


def test_problems_go_to_stderr_one_a_line_and_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_sample(tmp_path, ("group_size: 4", "group_size: four"), ("seed: 11", "sede: 11"))

    assert run_command(["check", str(file)]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        f"error: {file}:3: sede: unknown key 'sede' → did you mean 'seed'?",
        f"error: {file}:13: explorer.group_size: expected a whole number, found the text 'four' → the default is 8",
        f"2 problems in {file}",
        "not checked yet: whether groups, batches and periods fit, because explorer.group_size has problems",
    ]


def test_what_a_problem_hides_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_sample(
        tmp_path,
        ("FOLDER/tasks.jsonl, prompt: question}\n  heldout", "FOLDER/task.jsonl, prompt: question}\n  heldout"),
        ("gold: wanted", "gold: wnated"),
    )

    assert run_command(["check", str(file)]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        "not checked yet: columns that operators read, because tasks.train has problems"
    ]


def test_the_summary_shows_numbers_as_they_were_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_sample(tmp_path, ("gold: wanted}", "gold: wanted, weight: 0.123456789}"))

    assert run_command(["check", str(file), "--set", "loop.steps=1", "--set", "loop.evaluate.every_steps=1"]) == 0
    out = capsys.readouterr().out
    assert "scores with weight 0.123456789" in out
    assert "train, 1 step, store" in out
    assert "heldout every step\n" in out


@pytest.mark.parametrize(("value", "shown"), [(0.0625, "0.0625"), (1.0, "1"), (2e-05, "2e-05"), (0.1, "0.1")])
def test_a_number_keeps_every_digit(value: float, shown: str) -> None:
    assert as_written(value) == shown


def test_warnings_go_to_stderr_and_exit_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_sample(tmp_path, ("rows: 16", "rows: 18"))

    assert run_command(["check", str(file)]) == 0
    assert f"warning: {file}:24: trainer.read.rows:" in capsys.readouterr().err


def test_print_gives_yaml_that_loads_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_sample(tmp_path)

    assert run_command(["check", str(file), "--print", "--set", "seed=5"]) == 0

    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load_spec(printed).spec == load_spec(file, overrides=("seed=5",)).spec


def test_a_long_line_is_not_wrapped_when_piped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 300
    assert run_command(["check", str(write_sample(tmp_path)), "--set", f"{long}=1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_check_needs_no_heavy_module_and_little_time(tmp_path: Path) -> None:
    facts = facts_of(in_a_new_process("check", str(write_sample(tmp_path))))

    assert facts["code"] == 0
    heavy = {"torch", "transformers", "duckdb", "peft", "safetensors", "reasoning_gym", "math_verify", "matplotlib"}
    assert not heavy & set(facts["modules"])  # type: ignore[call-overload]
    assert facts["cpu"] < 2.0  # type: ignore[operator]


def test_operators_lists_each_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["operators"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(OPERATORS.names())
    assert all(len(line.split()) > 1 for line in lines)


def test_one_operator_is_explained_with_fields_and_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["operators", "ended"]) == 0

    out = capsys.readouterr().out
    assert "ended (operator)" in out
    assert "on_error" in out
    assert "reads: eos_sampled" in out
    assert "scores: ended" in out


@pytest.mark.parametrize("kind", ["tasks", "workflows", "models", "trainers", "algorithms", "advantages"])
def test_every_kind_of_component_can_be_listed_and_explained(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["operators", "--kind", kind]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert run_command(["operators", line.split()[0], "--kind", kind]) == 0


def test_schema_prints_every_column_of_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["schema"]) == 0

    out = capsys.readouterr().out
    for name, table in TABLES.items():
        assert f"{name}: {table.doc}" in out
        assert all(field.name in out for field in table.schema)
    assert set(TABLES) < set(DOCUMENTED_TABLES)


def test_schema_says_what_null_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["schema", "scores"]) == 0
    assert "looked at and could not be scored; never means 0" in capsys.readouterr().out


def test_doctor_reports_versions_extras_and_folders(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor"]) == 0

    out = capsys.readouterr().out
    assert f"polars         {installed('polars')}" in out
    for word in ("torch", "processors", "cache", "GiB free"):
        assert word in out


def test_doctor_says_which_extras_this_version_does_not_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor"]) == 0

    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    for extra in ("vllm", "labels", "ray"):
        assert lines[extra].endswith("declared, not used by this version")
    assert "not used" not in lines["math"]


def test_no_field_on_the_reference_pages_lacks_its_meaning() -> None:
    for page in ("components.md", "specification.md", "tables.md"):
        rows = [
            line for line in (ROOT / "docs" / "reference" / page).read_text().splitlines() if line.startswith("| `")
        ]
        assert len(rows) > 20
        assert [row for row in rows if row.endswith("|  |")] == []


def test_doctor_finds_a_folder_that_could_shadow_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)

    assert run_command(["doctor"]) == 0
    assert f"{tmp_path}/trainers has the name of a package of buffer-engine" in capsys.readouterr().out


def test_doctor_can_require_an_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.diagnosis.EXTRAS", {"ray": ("no-such-distribution-anywhere",)})

    assert run_command(["doctor", "--require", "ray"]) == 3
    assert "buffer-engine[ray]" in capsys.readouterr().err


def test_the_extras_known_to_doctor_are_those_of_the_package() -> None:
    declared = declared_extras()
    if not declared:
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
        declared = {
            extra: {line.split(">")[0].split("[")[0] for line in lines}
            for extra, lines in tomllib.loads(text)["project"]["optional-dependencies"].items()
        }

    for extra, distributions in EXTRAS.items():
        if extra != "demo":  # made of other extras
            assert set(distributions) == declared[extra]
    assert set(declared) - set(EXTRAS) == {"dev"}


ROOT = Path(__file__).parents[2]


def whole_specifications() -> list[tuple[str, str]]:
    """(page, text) of every YAML block of the documentation that is a whole specification."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        (f"{page.relative_to(ROOT)}", textwrap.dedent(block))
        for page in pages
        for block in re.findall(r"^ *```ya?ml\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        if re.search(r"^\s*version: 1$", block, re.MULTILINE)
    ]


def test_the_documentation_shows_a_whole_specification() -> None:
    assert "docs/configuration.md" in [page for page, _ in whole_specifications()]


@pytest.mark.parametrize(("page", "text"), whole_specifications())
def test_every_specification_shown_in_the_documentation_is_sound(
    page: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shown.yaml"
    file.write_text(text)

    assert run_command(["check", str(file)]) == 0, page
    warnings = [line for line in capsys.readouterr().err.splitlines() if "is not installed here" not in line]
    assert warnings == []


@pytest.mark.parametrize(("page", "text"), whole_specifications())
def test_a_run_accepts_the_tasks_of_every_specification_shown(page: str, text: str, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    file = tmp_path / "shown.yaml"
    file.write_text(text)
    spec = load_spec(file).spec
    assert spec.explorer is not None, page
    assert spec.loop.evaluate is not None, page

    train, heldout = (
        {task.messages for task in TASKSETS.load(spec.tasks[name].type)(spec.tasks[name]).load(name)}  # type: ignore[attr-defined]
        for name in (spec.explorer.tasks, spec.loop.evaluate.tasks)
    )

    # Four fifths and one fifth of some 500 distinct prompts; a run refuses a prompt that is in both.
    assert len(train) > 300
    assert 60 < len(heldout) < 150
    assert not train & heldout


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "pipelines" / "examples").glob("*.yaml")))
def test_every_shipped_specification_is_sound(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])

    assert run_command(["check", str(file)]) == 0
