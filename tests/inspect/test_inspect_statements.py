"""Inspection reads and does nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from inspect_sample import sample_tables

from buffer_engine.inspect import Inspection, QueryError, connect


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1",
        "select 1;",
        "WITH one AS (SELECT 1 AS n) SELECT n FROM one",
        "FROM runs",
        "VALUES (1)",
        "DESCRIBE experiences",
        "SHOW TABLES",
        "SUMMARIZE scores",
        "EXPLAIN SELECT * FROM experiences",
        "EXPLAIN ANALYZE SELECT count(*) FROM scores",
        "PIVOT scores ON name USING avg(value) GROUP BY experience_id",
        "SELECT * FROM (PIVOT scores ON name USING avg(value) GROUP BY experience_id)",
        "UNPIVOT (SELECT 1 AS a, 2 AS b) ON a, b",
        "-- a comment first\nSELECT 1",
    ],
)
def test_reading_statements_run(sample: Inspection, sql: str) -> None:
    assert sample.query(sql).num_rows >= 1


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO rollouts VALUES (1)",
        "WITH one AS (SELECT 1) INSERT INTO scores SELECT * FROM one",
        "UPDATE scores SET value = 1",
        "DELETE FROM scores",
        "CREATE TABLE mine AS SELECT 1",
        "CREATE VIEW mine AS SELECT 1",
        "CREATE TABLE mine AS PIVOT scores ON name USING avg(value)",
        "DROP VIEW experiences",
        "ALTER TABLE scores ADD COLUMN x INT",
        "COPY (SELECT 1) TO '{folder}/out.csv'",
        "COPY scores FROM '{folder}/in.csv'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{folder}/out.csv'",
        "EXPLAIN ANALYZE CREATE TABLE mine AS SELECT 1",
        "EXPORT DATABASE '{folder}/out'",
        "IMPORT DATABASE '{folder}'",
        "ATTACH '{folder}/other.db'",
        "INSTALL httpfs",
        "LOAD json",
        "SET threads = 1",
        "SET enable_external_access = true",
        "RESET enable_external_access",
        "PRAGMA database_list",
        "CALL pragma_version()",
        "CHECKPOINT",
        "BEGIN",
        "COMMIT",
        "PREPARE p AS SELECT 1",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP VIEW experiences",
        "",
        "-- nothing but a comment",
        "SELECT * FROM read_csv('{folder}/in.csv')",
        "SELECT * FROM '{folder}/in.csv'",
        "SELECT * FROM read_text('{folder}/in.csv')",
        "SELECT * FROM read_parquet('{folder}/in.csv')",
        "SELECT * FROM glob('{folder}/*')",
        "SELECT * FROM sniff_csv('{folder}/in.csv')",
    ],
)
def test_anything_that_writes_or_reaches_outside_is_refused(sample: Inspection, tmp_path: Path, sql: str) -> None:
    (tmp_path / "in.csv").write_text("secret\n1\n")
    with pytest.raises(QueryError):
        sample.query(sql.format(folder=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]
    # Nothing stays behind that would disturb the next question.
    assert sample.query("SELECT count(*) AS n FROM rollouts").to_pylist() == [{"n": 8}]
    assert sample.query("SELECT * FROM duckdb_tables() WHERE table_name = 'mine'").num_rows == 0


def test_a_variable_of_the_program_is_no_table(sample: Inspection) -> None:
    secret = sample_tables()["scores"]
    assert secret.num_rows > 0
    with pytest.raises(QueryError, match="no view or table named 'secret'"):
        sample.query("SELECT * FROM secret")


def test_the_refusal_says_what_is_allowed_and_how_to_keep_a_result(sample: Inspection) -> None:
    with pytest.raises(QueryError, match=r"^COPY is refused: .*SELECT, WITH.*--format and --output"):
        sample.query("COPY (SELECT 1) TO 'x'")


def test_reading_a_file_is_refused_with_the_reason(sample: Inspection) -> None:
    with pytest.raises(QueryError, match="a query sees the store's views only"):
        sample.query("SELECT * FROM read_csv('/etc/hostname')")


def test_an_unknown_view_gets_the_nearest_name_and_the_list(sample: Inspection) -> None:
    with pytest.raises(QueryError) as caught:
        sample.query("SELECT * FROM experience")
    assert "no view or table named 'experience': did you mean 'experiences'?" in str(caught.value)
    assert "conservation" in str(caught.value)
    assert "pg_" not in str(caught.value)


def test_an_unknown_column_gets_its_candidates(sample: Inspection) -> None:
    with pytest.raises(QueryError, match=r'"rewrd" not found(.|\n)*"reward"'):
        sample.query("SELECT rewrd FROM experiences")


def test_a_syntax_error_points_at_its_place(sample: Inspection) -> None:
    with pytest.raises(QueryError, match=r'syntax error at or near "SELEC"'):
        sample.query("SELEC 1")


def test_an_error_while_running_leaves_the_connection_usable(sample: Inspection) -> None:
    with pytest.raises(QueryError, match="Could not convert"):
        sample.query("SELECT CAST(experience_id AS INT) FROM rollouts")
    assert sample.query("SELECT 1 AS n").to_pylist() == [{"n": 1}]


def test_parameters_are_values_never_sql(sample: Inspection) -> None:
    hostile = "a0' OR 1=1 --"
    assert sample.query("SELECT * FROM rollouts WHERE experience_id = $1", [hostile]).num_rows == 0
    assert sample.query("SELECT * FROM rollouts WHERE experience_id = $id", {"id": "a0"}).num_rows == 1


def test_a_stream_hands_out_batches_and_frees_the_connection(sample: Inspection) -> None:
    with sample.stream("SELECT experience_id FROM rollouts ORDER BY 1", rows=3) as reader:
        first = reader.read_next_batch()
    assert first.num_rows > 0
    assert sample.query("SELECT count(*) AS n FROM rollouts").to_pylist() == [{"n": 8}]


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(QueryError, match="unknown table 'rollout'; known: tasks, rollouts"):
        connect({"rollout": sample_tables()["rollouts"]})
