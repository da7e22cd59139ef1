"""Where models are looked for on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.errors import FetchError
from server.store.hub import Hub
from server.store.names import HubName
from server.store.obtain import Obtainer, fetch_command
from server.store.places import Places
from server.store.transfer import TransferOptions
from tests.store.test_fetch import Notes

REPO = "unsloth/GLM-5.2-GGUF"


def put(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "models", tmp_path / "hf")


def test_the_environment_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    cache = Path("/home/u/.cache")
    assert Places.from_environment({}) == Places(cache / "glmserve/models", cache / "huggingface/hub")
    assert Places.from_environment({"XDG_CACHE_HOME": "/x"}) == Places(
        Path("/x/glmserve/models"), Path("/x/huggingface/hub")
    )
    assert Places.from_environment({"HF_HOME": "/h"}, "~/m") == Places(Path("/home/u/m"), Path("/h/hub"))
    assert Places.from_environment({"HF_HOME": "/h", "HF_HUB_CACHE": "/c"}).hf_cache == Path("/c")


def test_a_fetched_model_is_found_by_its_name(places: Places) -> None:
    folder = places.folder(REPO, "UD-Q4_K_M")
    assert folder == places.models / "unsloth--GLM-5.2-GGUF" / "UD-Q4_K_M"
    names = [f"m-{i:05d}-of-00002.gguf" for i in (1, 2)]
    put(folder, names[0])
    assert places.find(HubName(REPO, "ud-q4_k_m")) is None
    put(folder, names[1], f"{names[1]}.part")
    assert places.find(HubName(REPO)) is None
    (folder / f"{names[1]}.part").unlink()
    assert places.find(HubName(REPO, "ud-q4_k_m")) == folder / names[0]
    assert places.find(HubName(REPO)) == folder / names[0]
    assert places.find(HubName(REPO, file=f"any/{names[1]}")) == folder / names[0]
    assert places.find(HubName(REPO, "Q8_0")) is None
    put(places.folder(REPO, "Q8_0"), "m-Q8_0.gguf")
    assert places.find(HubName(REPO)) is None  # two: nobody can say which
    assert places.find(HubName(REPO, "Q8_0")) == places.folder(REPO, "Q8_0") / "m-Q8_0.gguf"


def test_hugging_faces_cache_is_used_where_it_is_whole(places: Places) -> None:
    repo = places.hf_cache / "models--unsloth--GLM-5.2-GGUF"
    snapshot = repo / "snapshots" / "c0ffee"
    put(repo / "refs")
    (repo / "refs" / "main").write_text("c0ffee")
    put(snapshot / "UD-Q4_K_M", "m-00001-of-00002.gguf")
    assert places.find(HubName(REPO, "UD-Q4_K_M")) is None
    put(snapshot / "UD-Q4_K_M", "m-00002-of-00002.gguf")
    found = snapshot / "UD-Q4_K_M" / "m-00001-of-00002.gguf"
    assert places.find(HubName(REPO, "UD-Q4_K_M")) == found
    assert places.find(HubName(REPO, revision="c0ffee")) == found
    assert places.find(HubName(REPO, revision="decade")) is None


def test_offline_what_is_not_here_is_told_with_the_command(places: Places) -> None:
    obtainer = Obtainer(Hub(offline=True), places, TransferOptions(), Notes())
    with pytest.raises(FetchError) as caught:
        obtainer.find(HubName(REPO, "UD-Q4_K_M"))
    assert f"is not on this machine (neither in '{places.models}' nor in '{places.hf_cache}')" in caught.value.message
    assert f"'python -m server fetch {REPO}:UD-Q4_K_M --to DIR'" in caught.value.message
    put(places.folder(REPO, "UD-Q4_K_M"), "m.gguf")
    assert obtainer.find(HubName(REPO, "UD-Q4_K_M")).name == "m.gguf"


def test_the_command_names_everything() -> None:
    name = HubName("a/b", file="q/m x.gguf", revision="v2")
    assert fetch_command(name, to=Path("/d")) == "python -m server fetch a/b --file 'q/m x.gguf' --revision v2 --to /d"
