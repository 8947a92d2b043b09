"""The reading verbs of the command line over a real store."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from inspect_sample import ROWS, TOKEN_STATS_ROWS

from buffer_engine.inspect import connect
from buffer_engine.schema import TABLES
from buffer_engine.store.base import ReadPolicy
from buffer_engine.store.opening import open_store
from pipelines.cli.console import results
from pipelines.cli.main import run_command
from pipelines.cli.rendering import cell_text, plain_value, render_result
from pipelines.cli.short_ids import short_ids
from pipelines.cli.store import folder_sizes

Run = Callable[..., tuple[int, str, str]]


def arrow(name: str, rows: list[dict]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=TABLES[name].schema)


def write_sample(folder: Path) -> None:
    """The whole hand-made run, batches reserved, prepared and committed as a trainer would."""
    with open_store(folder, durability="process") as store:
        for name in ("tasks", "rollouts", "scores", "decisions", "operator_runs", "metrics", "events"):
            store.append(name, arrow(name, ROWS[name]))
        store.append("models", arrow("models", ROWS["models"][:1]))
        for number, rows in ((1, 2), (2, 1)):
            batch_id = f"batch-{number}"
            reservation = store.reserve(ReadPolicy(rows=rows), run_id="r1", batch_id=batch_id, model_version=number - 1)
            assert reservation is not None
            used = [row for row in ROWS["batch_rows"] if row["batch_id"] == batch_id]
            store.prepare_batch(
                reservation,
                step=number,
                batch=arrow("batches", [ROWS["batches"][number - 1]]),
                rows=arrow("batch_rows", used),
            )
            store.commit_batch(
                batch_id,
                step=number,
                model=arrow("models", [ROWS["models"][number]]),
                token_stats=arrow("token_stats", TOKEN_STATS_ROWS) if number == 1 else None,
            )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "store"
    write_sample(folder)
    return folder


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run_command([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


REWARDS = "SELECT experience_id, reward FROM experiences ORDER BY 1 LIMIT 3"


def test_a_question_prints_a_table_and_its_size(run: Run, folder: Path) -> None:
    code, out, err = run("sql", folder, REWARDS)
    assert code == 0
    assert [line.split() for line in out.splitlines()[2:]] == [["a0", "1.5"], ["a1", "0.5"], ["b0", "1"]]
    assert err.strip() == "3 rows"


def test_csv_goes_to_standard_output_with_nested_values_as_json(run: Run, folder: Path) -> None:
    query = (
        "SELECT experience_id, solved, error, by_name FROM experiences JOIN reward_components USING (experience_id) "
    )
    code, out, _ = run("sql", folder, query + "WHERE experience_id IN ('a1', 'c1') ORDER BY 1", "--format", "csv")
    rows = list(csv.reader(io.StringIO(out)))
    assert code == 0
    assert rows[0] == ["experience_id", "solved", "error", "by_name"]
    assert rows[1][:3] == ["a1", "false", ""]
    assert json.loads(rows[1][3]) == {"answer": 0.0, "ended": 0.0, "parsable": 0.0, "style": 1.0}
    assert json.loads(rows[2][3]) == {"answer": None, "style": 1.0}


def test_json_is_one_array_with_an_object_per_line(run: Run, folder: Path) -> None:
    code, out, _ = run("sql", folder, REWARDS, "--format", "json")
    assert code == 0
    assert json.loads(out) == [
        {"experience_id": "a0", "reward": 1.5},
        {"experience_id": "a1", "reward": 0.5},
        {"experience_id": "b0", "reward": 1.0},
    ]
    assert len(out.splitlines()) == 5
    assert json.loads(run("sql", folder, "SELECT 1 AS n WHERE false", "--format", "json")[1]) == []


def test_parquet_needs_a_file_or_a_pipe_and_keeps_types(run: Run, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.parquet"
    code, out, _ = run("sql", folder, "FROM rollouts", "--output", target)
    assert (code, out) == (0, "")
    table = pq.read_table(target)
    assert table.num_rows == 8
    assert pa.types.is_list(table.schema.field("token_ids").type)
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]
    piped = subprocess.run(
        [sys.executable, "-m", "pipelines.cli.main", "sql", str(folder), REWARDS, "--format", "parquet"],
        capture_output=True,
        check=True,
    )
    assert pq.read_table(io.BytesIO(piped.stdout)).column("reward").to_pylist() == [1.5, 0.5, 1.0]


def test_a_failed_question_leaves_the_old_file_alone(run: Run, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "kept.csv"
    target.write_text("old\n")
    code, _, err = run("sql", folder, "SELECT CAST(experience_id AS INT) FROM rollouts", "--output", target)
    assert code == 2
    assert "Could not convert" in err
    assert target.read_text() == "old\n"
    assert [path.name for path in tmp_path.iterdir()] == ["kept.csv"]
    assert run("sql", folder, REWARDS, "--output", tmp_path / "no" / "x.csv")[0] != 0


def test_named_queries_and_the_list(run: Run, folder: Path) -> None:
    code, out, _ = run("sql", folder, "--name", "why_rejected", "--format", "csv")
    assert code == 0
    assert out.splitlines()[1] == "r1,exact_dedup,duplicate,1,0.5,b1,same response"
    code, out, _ = run("sql", "--list")
    assert code == 0
    assert "conservation" in out
    assert "reward_hacking_suspects" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("SELECT * FROM experience",), "did you mean 'experiences'?"),
        (("SELECT rewrd FROM experiences",), 'Candidate bindings: "reward"'),
        (("DROP VIEW experiences",), "DROP is refused"),
        (("SELECT * FROM read_csv('/etc/hostname')",), "a query sees the store's views only"),
        ((), "what should be asked?"),
        (("SELECT 1", "--name", "errors"), "either a query or --name"),
        (("--name", "error"), "known: dead_groups"),
        (("SELECT 1", "--format", "cvs"), "did you mean 'csv'?"),
        (("SELECT 1", "--until", "9999"), "version 9999 does not exist yet"),
    ],
)
def test_a_wrong_question_is_told_plainly(run: Run, folder: Path, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run("sql", folder, *arguments)
    assert code == (1 if "--until" in arguments else 2)
    assert out == ""
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize("verb", [("sql", "{}", "SELECT 1"), ("show", "{}", "a0"), ("explain", "{}", "--batch", "1"),
                                  ("store", "info", "{}"), ("store", "verify", "{}")])  # fmt: skip
def test_a_path_without_a_store_is_a_wrong_command(run: Run, tmp_path: Path, verb: tuple[str, ...]) -> None:
    missing = [part.format(tmp_path / "nothing") for part in verb]
    code, _, err = run(*missing)
    assert (code, "there is no store here" in err) == (2, True)
    assert not (tmp_path / "nothing").exists()
    other = [part.format(tmp_path) for part in verb]
    code, _, err = run(*other)
    assert (code, "not a store" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_show_prints_one_experience_to_read(run: Run, folder: Path) -> None:
    code, out, _ = run("show", folder, "a0")
    assert code == 0
    for part in ("1+1=", "trained at step 1", "reward 1.5", "human", "ann", "batch-1", "keep"):
        assert part in out, part


def test_show_prints_a_group_with_its_siblings(run: Run, folder: Path) -> None:
    code, out, _ = run("show", folder, "g2")
    assert code == 0
    assert "reward 1 ± 0" in out
    assert "b0" in out
    assert "exact_dedup" in out


def test_show_takes_the_beginning_of_an_id_when_it_is_unique(run: Run, folder: Path) -> None:
    assert "experience d0" in run("show", folder, "d")[1]
    code, _, err = run("show", folder, "a")
    assert (code, "several ids: a0, a1" in err) == (2, True)
    code, _, err = run("show", folder, "zz")
    assert (code, "no experience or group begins with 'zz'" in err) == (2, True)
    # `g` begins the ids of five groups; `g1` is one of them exactly.
    assert "group g1" in run("show", folder, "g1")[1]


def test_show_tokens_are_coloured_by_log_probability(run: Run, folder: Path) -> None:
    code, out, err = run("show", folder, "a1", "--tokens")
    assert code == 0
    assert "1 2 11 3" in out
    assert "--tokenizer FOLDER" in err


def test_show_and_explain_say_what_a_recorded_step_saw(run: Run, folder: Path) -> None:
    code, out, _ = run("show", folder, "a1", "--tokens")
    assert code == 0
    assert "furthest from the sampler at step 1" in out
    assert "recorded steps" in out
    # Ratios 1 and 1.5: the second token has moved most.
    place = out.index("furthest")
    assert out.index("1.5", place) < out.index("recorded steps")
    _, out, _ = run("show", folder, "b0", "--tokens")
    assert "furthest" not in out
    assert "recorded steps: none" in out
    _, out, _ = run("explain", folder, "--row", "a1")
    assert "trained at step 1, staleness 0, ratio to the sampler 1.25 (1 … 1.5)" in out


def test_sql_searches_messages_and_says_what_it_cannot_read(run: Run, folder: Path, tmp_path: Path) -> None:
    # A copy: searching makes a file beside the catalog.
    folder = shutil.copytree(folder, tmp_path / "searched")
    code, out, _ = run("sql", folder, "--search", "six", "--format", "csv")
    assert code == 0
    [hit] = csv.DictReader(io.StringIO(out))
    assert (hit["experience_id"], hit["role"], hit["snippet"]) == ("c1", "assistant", "[six]")
    code, out, _ = run("sql", folder, "SELECT count(*) AS n FROM search('\"2+2=\"')", "--format", "csv")
    assert (code, out) == (0, "n\n2\n")
    code, _, err = run("sql", folder, "--search", "2+2=")
    assert code == 2
    assert "cannot be understood" in err
    code, _, err = run("sql", folder, "FROM runs", "--search", "six")
    assert code == 2
    assert "--search stands alone" in err


def test_explain_says_what_a_step_was_made_of(run: Run, folder: Path) -> None:
    code, out, _ = run("explain", folder, "--batch", "1")
    assert code == 0
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "mean 0.875" in lines["reward used"]
    assert lines["weights before"].split()[-1] == "0"
    assert lines["weights after"].split()[-1] == "1"
    assert lines["configuration"].split()[-1] == "conf"
    assert "rows (all: score versions 1, weight 1, kind rollout, staleness 0)" in out
    assert "advantage                      -0.5 … 0.5, mean 0\n" in out
    assert "operators that the rows passed (pass p1)" in out
    # a0 was used with 1.25; ann's later score makes it 1.5 now.
    [row] = [line.split() for line in out.splitlines() if " a0 " in line]
    assert row[3:6] == ["1.25", "1.5", "0.5"]
    assert "1 of 2 rows scored anew since" in out
    assert "exact_dedup" in out
    assert "duplicate" in out


def test_explain_tells_the_life_of_a_row_in_order(run: Run, folder: Path) -> None:
    code, out, _ = run("explain", folder, "--row", "a0")
    assert code == 0
    order = ["made by explorer", "scored answer = 1", "keep by pipeline", "put into batch-1", "human ann, version 2"]
    places = [out.index(part) for part in order]
    assert places == sorted(places)
    assert "reward 1.25 from answer version 1, style version 1, advantage 0.5" in out
    assert "trained at step 1, staleness 0" in out
    assert "now  trained, reward 1.5" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch", "9"), "no batch has step 9; there are r1: steps 1 to 2"),
        (("--batch", "1", "--run", "r2"), "no batch of run 'r2' has step 1"),
        ((), "explain either --batch STEP or --row ID"),
        (("--row", "g1"), "g1 is a group"),
    ],
)
def test_explain_without_an_answer_says_why(run: Run, folder: Path, arguments: tuple[str, ...], said: str) -> None:
    code, _, err = run("explain", folder, *arguments)
    assert (code, said in err) == (2, True)


def big_store(folder: Path) -> str:
    """One group of forty siblings with ids as long as real ones, trained in one batch; returns the group's id."""
    group = "g" + "0123456789abcdef" + "a" * 8
    ids = [f"x{place:02d}" + "5" * 22 for place in range(40)]
    rows = [
        {**ROWS["rollouts"][0], "experience_id": each, "group_id": group, "group_size": 40, "sample_index": place}
        for place, each in enumerate(ids)
    ]
    verdicts = [{**ROWS["decisions"][1], "experience_id": each, "pass_id": "r1/0"} for each in ids]
    used = [
        {**ROWS["batch_rows"][0], "batch_id": "r1/1", "position": place, "experience_id": each, "group_id": group,
         "advantage": 1e-17, "score_versions_json": '{"answer": 1, "style": 2}' if place == 3 else '{"answer": 1}'}
        for place, each in enumerate(ids)
    ]  # fmt: skip
    with open_store(folder, durability="process") as store:
        for name, found in (("tasks", ROWS["tasks"]), ("rollouts", rows), ("decisions", verdicts)):
            store.append(name, arrow(name, found))
        reservation = store.reserve(ReadPolicy(rows=40), run_id="r1", batch_id="r1/1", model_version=0)
        assert reservation is not None
        manifest = {**ROWS["batches"][0], "batch_id": "r1/1", "rows": 40}
        store.prepare_batch(reservation, step=1, batch=arrow("batches", [manifest]), rows=arrow("batch_rows", used))
        store.commit_batch("r1/1", step=1, model=arrow("models", [ROWS["models"][1]]))
    return group


@pytest.mark.parametrize("width", [80, 120])
def test_a_batch_of_forty_rows_takes_one_line_a_row(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    group = big_store(tmp_path / "s")
    monkeypatch.setattr(results, "_force_terminal", True)
    monkeypatch.setattr(results, "_width", width)
    code, out, _ = run("explain", tmp_path / "s", "--batch", "1")
    assert code == 0
    lines = [line.split() for line in out.splitlines() if " x" in line]
    assert [line[0] for line in lines] == [str(place) for place in range(40)]
    # Six letters name each row and the group; an advantage of 1e-17 is 0; only a later score version is told.
    assert lines[3] == ["3", "x03555", group[:6], "1.25", "null", "0", "style", "v2"]
    assert lines[4] == ["4", "x04555", group[:6], "1.25", "null", "0"]
    assert run("show", tmp_path / "s", "x03555")[0] == 0
    code, out, _ = run("show", tmp_path / "s", group)
    rows = [line.split() for line in out.splitlines() if " x" in line and "·" not in line]
    assert [row[:3] for row in rows] == [[str(place), f"x{place:02d}555", "trained"] for place in range(40)]
    assert "sample   experience   fate" in out


def test_short_ids_grow_until_no_other_id_begins_alike() -> None:
    # b0 and its namesake differ at the eighth letter only.
    names = {"b0": "xaaaaaaa1", "b1": "xaaaaaaa2"}
    rows = [{**row, "experience_id": names.get(row["experience_id"], row["experience_id"])} for row in ROWS["rollouts"]]
    with connect({"rollouts": arrow("rollouts", rows)}) as inspection:
        assert short_ids(inspection, ["xaaaaaaa1", "a0", None]) == {"xaaaaaaa1": "xaaaaaaa1", "a0": "a0"}


def test_a_piped_table_folds_nothing_however_wide() -> None:
    table = pa.table({name: ["arithmetic-grpo-" + name * 30] for name in "abcdefghij"})
    text, remarks = render_result(table, width=None, most_rows=None, longest_cell=None)
    assert len(text.splitlines()) == 3
    assert all("arithmetic-grpo-" + name * 30 in text for name in "abcdefghij")
    assert remarks == ["1 row"]


def test_a_table_that_just_fits_folds_nothing_and_one_that_does_not_says_so() -> None:
    # Widths 20 and 20 and the gap of 3: 43.
    table = pa.table({"a": ["word " * 3 + "wwwww"], "b": ["x" * 20]})
    text, remarks = render_result(table, width=43, most_rows=None, longest_cell=None)
    assert (len(text.splitlines()), remarks) == (3, ["1 row"])
    text, remarks = render_result(table, width=42, most_rows=None, longest_cell=None)
    # The text gives way, the id stays whole.
    assert (len(text.splitlines()), "x" * 20 in text) == (4, True)
    assert "| less -S" in remarks[1]


def test_headers_and_numbers_are_never_broken() -> None:
    table = pa.table({"explore_tokens_per_second": [1.5], "text": ["word " * 30]})
    text, _ = render_result(table, width=60, most_rows=None, longest_cell=None)
    assert "explore_tokens_per_second" in text.splitlines()[0]


def test_tokens_get_their_texts_from_a_tokenizer_file_alone(run: Run, folder: Path, tmp_path: Path) -> None:
    vocabulary = {f"<{number}>": number for number in range(20)} | {"two": 10}
    del vocabulary["<10>"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<0>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    query = "SELECT token_id, token_text FROM tokens WHERE experience_id = 'a0' ORDER BY position"
    code, out, err = run("sql", folder, query, "--tokenizer", tmp_path, "--format", "csv")
    assert (code, out.splitlines()[1:]) == (0, ["1,<1>", "2,<2>", "10,two", "3,<3>"])
    assert "token_text is null without --tokenizer" in run("sql", folder, query)[2]
    code, _, err = run("sql", folder, query, "--tokenizer", tmp_path / "none")
    assert (code, "or one of: smollm2-135m" in err) == (2, True)
    (tmp_path / "tokenizer.json").write_text("{")
    code, _, err = run("sql", folder, query, "--tokenizer", tmp_path)
    assert (code, "is no tokenizer" in err) == (2, True)


def test_texts_of_tokens_need_no_model_library(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    code = (
        "import sys, pathlib; from pipelines.vocabulary import read_vocabulary\n"
        "print(read_vocabulary(pathlib.Path(sys.argv[1])).to_pylist())\n"
        "print([name for name in ('transformers', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "[{'token_id': 0, 'text': 'a'}, {'token_id': 1, 'text': 'b'}]\n[]\n"


def test_info_tells_what_takes_room_in_the_folder(run: Run, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "weights" / "r1").mkdir(parents=True)
    (copy / "weights" / "r1" / "a").write_bytes(b"x" * 1234)
    (copy / "weights" / "b").write_bytes(b"x" * 6)
    (copy / "reward.png").write_bytes(b"x" * 77)
    code, out, _ = run("store", "info", copy)
    sizes = {line.split("  ")[0]: line.split()[-2:] for line in out.splitlines()}
    assert code == 0
    assert (sizes["weights"], sizes["checkpoints"], sizes["other files"]) == (["2", "1,240"], ["0", "0"], ["1", "77"])
    total = sum(file.stat().st_size for file in copy.rglob("*") if file.is_file())
    assert sum(size for *_, size in folder_sizes(copy)) == total
    assert "train rollouts 7: kept 4, rejected 2, held 1, failed 1, trained 3" in out


def test_info_counts_rows(run: Run, folder: Path) -> None:
    code, out, _ = run("store", "info", folder)
    assert code == 0
    counted = {line.split()[0]: line.split()[1] for line in out.splitlines() if len(line.split()) == 5}
    assert counted["rollouts"] == "8"
    assert counted["scores"] == "22"


def test_verify_says_what_was_checked_when_all_is_sound(run: Run, folder: Path) -> None:
    code, out, _ = run("store", "verify", folder)
    assert code == 0
    # Eight rollouts with their rows beside: 4 + 8 + 22 + 8 + 8 + 2 + 3 + 3 + 24 + 1 rows in ten tables.
    assert "sound. 85 rows read and checked" in out
    assert "14 books balance" in out


def test_verify_finds_a_changed_byte_and_fails(run: Run, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    [segment] = (copy / "segments" / "rollouts").iterdir()
    data = bytearray(segment.read_bytes())
    place = data.rindex(b"six")
    data[place] ^= 0xFF
    segment.write_bytes(data)
    code, out, err = run("store", "verify", copy)
    assert code == 1
    assert "checksum" in out
    assert "finding" in err
    assert "Traceback" not in err


def test_verify_finds_books_that_do_not_balance(run: Run, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    leaking = {**ROWS["operator_runs"][1], "pass_id": "p9"}
    with open_store(copy, durability="process") as store:
        store.append("operator_runs", arrow("operator_runs", [leaking]))
    code, out, _ = run("store", "verify", copy)
    assert code == 1
    assert "rejected + held = decisions" in out


def test_a_wide_result_becomes_blocks_instead_of_unreadable_columns() -> None:
    table = pa.table({f"column_{index}": [f"value {index} " * 3] for index in range(12)})
    text, _ = render_result(table, width=80, most_rows=None, longest_cell=None)
    assert "── row 1" in text
    assert all(f"value {index} value {index}" in text for index in range(12))


def test_what_is_left_out_of_a_table_is_said() -> None:
    table = pa.table({"n": list(range(100)), "text": ["x" * 200] * 100})
    text, remarks = render_result(table, width=120, most_rows=40, longest_cell=80)
    assert len(text.splitlines()) == 42
    assert remarks == [
        "40 of 100 rows shown: --rows 0 shows all, --format csv writes all",
        "40 long values shortened (…): --full shows them whole",
    ]
    text, remarks = render_result(table, width=None, most_rows=None, longest_cell=None)
    assert text.count("x" * 200) == 100
    assert remarks == ["100 rows"]


def test_values_that_json_lacks_stay_distinct() -> None:
    assert plain_value([float("nan"), float("inf"), None, True, 2, b"\x01"]) == ["nan", "inf", None, True, 2, "01"]
    assert cell_text(None) == "null"
    assert cell_text("") == ""
    assert cell_text({"a": [1, None]}) == '{"a": [1, null]}'


def test_a_reader_that_stops_early_is_no_error(folder: Path) -> None:
    command = f'"{sys.executable}" -m pipelines.cli.main sql "{folder}" '
    command += '"SELECT i FROM range(300000) t(i)" --format csv | head -n 2'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=os.environ, check=False)
    assert done.stdout == "i\n0\n"
    assert done.stderr == ""
