"""Traps around storage: pickles that run code, files that only their writer can read."""

from __future__ import annotations

import ast
import io
import pickle
import zipfile
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from rich.console import Console
from tiny_run import write_specification

from pipelines.load import load_spec
from pipelines.runner import start_run

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("buffer_engine", "operators", "explorers", "trainers", "pipelines")
PICKLING_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "multiprocessing"}
PICKLING_CALLS = {("torch", "save"), ("torch", "load"), ("np", "save"), ("np", "load"), ("numpy", "load")}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The folder of a run with everything in it: store, checkpoint, weights, metrics, specification, TensorBoard."""
    folder = tmp_path_factory.mktemp("run")
    file = write_specification(folder, tiny_model, steps=3)
    start_run(load_spec(file, overrides=("report.tensorboard=true",)), Console(file=io.StringIO()))
    return folder / "store"


def pickling(tree: ast.AST) -> list[str]:
    """Imports and calls of a module that read or write pickles."""
    found: list[str] = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [name for name in names if name.partition(".")[0] in PICKLING_MODULES]
        if isinstance(node, ast.Attribute) and (ast.unparse(node.value), node.attr) in PICKLING_CALLS:
            found.append(ast.unparse(node))
    return found


def test_the_code_neither_writes_nor_reads_pickles() -> None:
    """Trap: a checkpoint or a queue is a pickle, and opening someone's file runs someone's code."""
    assert pickling(ast.parse("import pickle\nx = torch.load(f)")) == ["pickle", "torch.load"]
    guilty = {
        str(path.relative_to(ROOT)): found
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if (found := pickling(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert guilty == {}


def looks_pickled(path: Path) -> bool:
    """A pickle of protocol 2 or later, plain or as torch zips it."""
    data = path.read_bytes()
    if data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and data.endswith(b"."):
        return True
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith(".pkl") for name in archive.namelist())


def test_nothing_that_a_run_leaves_behind_is_a_pickle(finished_run: Path, tmp_path: Path) -> None:
    """Trap: the tables are clean, but optimizer state or generator state is pickled beside them."""
    import torch

    torch.save({"a": 1}, tmp_path / "a.pt")
    (tmp_path / "c").write_bytes(pickle.dumps([1, 2]))
    assert all(looks_pickled(tmp_path / name) for name in ("a.pt", "c"))
    files = [path for path in finished_run.rglob("*") if path.is_file()]
    kinds = {path.suffix for path in files}
    assert {".arrows", ".sqlite", ".safetensors", ".json", ".jsonl", ".yaml"} <= kinds
    assert [path for path in files if looks_pickled(path)] == []


def test_every_segment_of_a_run_opens_in_pyarrow_polars_and_duckdb(finished_run: Path) -> None:
    """Trap: rows can only be read by the framework, and only by the version that wrote them."""
    segments = sorted((finished_run / "segments").rglob("*.arrows"))
    tables = {path.parent.name for path in segments}
    assert {"tasks", "rollouts", "scores", "decisions", "batches", "batch_rows", "models", "metrics"} <= tables
    for path in segments:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
            rows = stream.read_all()
        assert pl.read_ipc_stream(path).height == rows.num_rows
        with duckdb.connect() as connection:
            connection.register("segment", rows)
            assert connection.execute("SELECT count(*) FROM segment").fetchone() == (rows.num_rows,)
