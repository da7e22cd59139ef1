"""Where models are kept: the models folder, with a folder of plain files for every repository and quant, and Hugging
Face's own cache, which is read and never written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from server.store.names import HubName
from server.store.part import part_path
from server.store.quants import RemoteFile, RemoteQuant, quants_of


@dataclass(frozen=True, slots=True)
class Places:
    models: Path
    hf_cache: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], models: str | None = None) -> Places:
        """`models`: what --models-dir says. HF_HUB_CACHE, HF_HOME and XDG_CACHE_HOME count as in huggingface_hub."""
        cache = Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        own = Path(models).expanduser() if models else cache / "glmserve" / "models"
        hf_home = Path(environment.get("HF_HOME") or cache / "huggingface").expanduser()
        named = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
        return cls(own, Path(named).expanduser() if named else hf_home / "hub")

    def folder(self, repo: str, quant: str) -> Path:
        """MODELS/OWNER--REPO/QUANT: one model in each, so that the folder itself can be given to --gguf."""
        return self.models / repo.replace("/", "--") / quant.replace("/", "--")

    def find(self, name: HubName) -> Path | None:
        """The first shard of a model that is here whole, by names and counts; in the models folder or in the cache."""
        return self._find_fetched(name) or self._find_cached(name)

    def _find_fetched(self, name: HubName) -> Path | None:
        repo = self.models / name.repo.replace("/", "--")
        try:
            folders = [entry for entry in sorted(repo.iterdir()) if entry.is_dir()]
        except OSError:
            return None
        files = [_file(path, repo) for folder in folders for path in sorted(folder.glob("*.gguf")) if _is_whole(path)]
        return _first_of(name, files, repo)

    def _find_cached(self, name: HubName) -> Path | None:
        repo = self.hf_cache / f"models--{name.repo.replace('/', '--')}"
        commits: list[Path] = []
        try:
            told = (repo / "refs" / name.revision).read_text(encoding="ascii").strip()
            commits = [repo / "snapshots" / told]
        except (OSError, ValueError):
            commits = [repo / "snapshots" / name.revision]
        for snapshot in commits:
            files = [_file(path, snapshot) for path in sorted(snapshot.rglob("*.gguf")) if path.is_file()]
            first = _first_of(name, files, snapshot)
            if first is not None:
                return first
        return None


def _is_whole(path: Path) -> bool:
    return path.is_file() and not part_path(path).exists()


def _file(path: Path, base: Path) -> RemoteFile:
    return RemoteFile(path.relative_to(base).as_posix(), path.stat().st_size, None)


def _first_of(name: HubName, files: list[RemoteFile], base: Path) -> Path | None:
    """The only whole quant that the name may mean, of those that are here."""
    found = [quant for quant in quants_of(files) if not quant.n_missing and _means(name, quant)]
    return base / found[0].files[0].path if len(found) == 1 else None


def _means(name: HubName, quant: RemoteQuant) -> bool:
    if name.file is not None:
        return name.file.rpartition("/")[2] in (file.name for file in quant.files)
    if name.quant is None:
        return True
    asked = name.quant.lower()
    folders = {file.path.rpartition("/")[0].lower() for file in quant.files}
    return quant.name.lower() == asked or asked in folders
