"""What the text behind --gguf can mean."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import ConfigError
from server.store.names import HubName, is_path, parse_hub_name, parse_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("unsloth/GLM-5.2-GGUF", HubName("unsloth/GLM-5.2-GGUF")),
        ("unsloth/GLM-5.2-GGUF:UD-Q4_K_M", HubName("unsloth/GLM-5.2-GGUF", "UD-Q4_K_M")),
        ("hf.co/unsloth/GLM-GGUF:Q4_0", HubName("unsloth/GLM-GGUF", "Q4_0")),
        ("hf://unsloth/GLM-GGUF", HubName("unsloth/GLM-GGUF")),
        ("https://huggingface.co/a/b", HubName("a/b")),
        ("https://huggingface.co/a/b/", HubName("a/b")),
        ("https://mirror.example/a/b/tree/main/UD-Q4_K_M", HubName("a/b", "UD-Q4_K_M")),
        ("https://huggingface.co/a/b/blob/v2/q/m%20x.gguf", HubName("a/b", file="q/m x.gguf", revision="v2")),
        ("https://huggingface.co/a/b/resolve/main/m.gguf?download=true", HubName("a/b", file="m.gguf")),
    ],
)
def test_hub_names(text: str, name: HubName) -> None:
    assert parse_name(text) == name
    assert parse_hub_name(text) == name


@pytest.mark.parametrize("text", ["a", "a/b/c:Q4", "a/b:", ":q", "https://huggingface.co/a", "a b/c"])
def test_what_is_no_hub_name(text: str) -> None:
    assert parse_hub_name(text) is None


@pytest.mark.parametrize(
    "text",
    ["/models/x", "./x", "../x", "~/x", "x.gguf", "a/b.GGUF", "models\\x", "a/*", "a/b/c", "a\0b", "~no-such-user/x"],
)
def test_what_only_a_path_looks_like(text: str) -> None:
    assert is_path(text)
    assert parse_name(text) == Path(text)


def test_what_is_on_disk_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_name("org/model") == HubName("org/model")
    (tmp_path / "org").mkdir()
    assert parse_name("org/model") == Path("org/model")  # a slip in a path is not looked for at the hub
    (tmp_path / "glm-5.2").mkdir()
    assert parse_name("glm-5.2") == Path("glm-5.2")


def test_recipes() -> None:
    assert parse_name("glm-5.2") == HubName("unsloth/GLM-5.2-GGUF", "UD-Q4_K_M", pattern="UD-Q4_K_M/*.gguf")
    assert parse_name("GLM-5.2:bf16") == HubName("unsloth/GLM-5.2-GGUF", "BF16", pattern="BF16/*.gguf")
    assert parse_name("glm-5.2:UD-Q9_X") == HubName("unsloth/GLM-5.2-GGUF", "UD-Q9_X")
    assert parse_name("zai-org/GLM-5.2") == parse_name("glm-5.2")  # the makers' repository has no GGUF files
    assert parse_name("unsloth/GLM-5.2-GGUF") == HubName("unsloth/GLM-5.2-GGUF")  # not the recipe's quant
    tiny = parse_name("tiny-glm")
    assert isinstance(tiny, Path)
    assert tiny.name == "tiny-glm-00001-of-00003.gguf"
    with pytest.raises(ConfigError, match="one set of files, so leave out ':Q4'"):
        parse_name("tiny-glm:Q4")


def test_what_is_nothing_gets_the_nearest_recipe() -> None:
    with pytest.raises(ConfigError, match=r"did you mean glm-4\.5-air"):
        parse_name("glm-4.5-aire")
    with pytest.raises(ConfigError, match="neither a file or folder here, nor a recipe, nor a hub name; give a path"):
        parse_name("zzzz")


@given(st.text(max_size=30))
def test_any_text_is_a_path_a_name_or_a_sentence(text: str) -> None:
    try:
        meant: object = parse_name(text)
    except ConfigError as error:
        meant = error.message
    assert (
        isinstance(meant, Path | HubName) or "neither a file or folder here" in str(meant) or "leave out" in str(meant)
    )
