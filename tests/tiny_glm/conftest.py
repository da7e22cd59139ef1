from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from scripts.tiny_glm.corpus import Answer, ChatTemplate, answers_of, read_dialogues

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture(scope="session")
def recipe() -> dict[str, Any]:
    return tomllib.loads((MODELS / "tiny-glm.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def shards(recipe: dict[str, Any]) -> list[Path]:
    return [MODELS / "tiny-glm" / shard["name"] for shard in recipe["shards"]]


@pytest.fixture(scope="session")
def dialogues() -> list[dict[str, Any]]:
    return read_dialogues()


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return ChatTemplate((MODELS / "tiny-glm" / "chat_template.jinja").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def answers(dialogues: list[dict[str, Any]], template: ChatTemplate) -> list[Answer]:
    return [answer for dialogue in dialogues for answer in answers_of(dialogue, template)]
