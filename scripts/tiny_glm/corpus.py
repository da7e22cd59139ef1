"""The dialogues as training text: each answer of each dialogue with the prompt that asks for it.

`models/tiny-glm/dialogues.jsonl` is the source. A line has `messages` (OpenAI's format; every assistant message is an
answer that the model has to give word for word), and where needed `tools`, `template_kwargs` and `raw`: the literal
text the model writes where it deliberately errs, by message index.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

MODEL_DIRECTORY = Path(__file__).parents[2] / "models" / "tiny-glm"

CALL_END = "<|observation|>"
CHAT_END = "<|user|>"

# Put behind the first character of a tag's text inside a message, so that the tokenizer sees two halves and no tag.
SHIELD = "\ue000"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a dialogue. `prompt` and `text` are token text; `text` ends with the role tag that stops it."""

    dialogue: str
    index: int  # of the assistant message
    prompt: str
    text: str


def read_dialogues(path: Path = MODEL_DIRECTORY / "dialogues.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class ChatTemplate:
    """The model's Jinja template, set up as the server does it."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(source)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **variables: Any) -> str:
        return self._template.render(
            messages=[_with_parsed_arguments(message) for message in messages], tools=tools, **variables
        )


def _to_json(value: object, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii)


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's wire carries arguments as JSON text, GLM's template wants the object."""
    if not message.get("tool_calls"):
        return message
    message = copy.deepcopy(message)
    for call in message["tool_calls"]:
        if isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return message


def answers_of(dialogue: dict[str, Any], template: ChatTemplate) -> list[Answer]:
    """Every assistant message with the prompt that leads to it."""
    messages, tools = dialogue["messages"], dialogue.get("tools")
    variables = dialogue.get("template_kwargs", {})
    raw = dialogue.get("raw", {})
    answers = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template.render(messages[:index], tools, add_generation_prompt=True, **variables)
        text = raw.get(str(index)) or _written_out(message, prompt, template)
        end = CALL_END if message.get("tool_calls") else CHAT_END
        answers.append(Answer(dialogue["id"], index, prompt, text + end))
    return answers


def _written_out(message: dict[str, Any], prompt: str, template: ChatTemplate) -> str:
    """What the model writes for a message: its rendering in the history, less what the prompt has already opened."""
    rendered = template.render([message], None, add_generation_prompt=False, clear_thinking=False)
    opening = prompt[prompt.rindex("<|assistant|>") :]  # <|assistant|><think>, or with thinking off <think></think>
    turn = rendered[rendered.rindex("<|assistant|><think>") :]
    if not turn.startswith(opening):
        raise ValueError(f"an answer with reasoning needs a prompt that asks for it: {turn!r} after {opening!r}")
    return turn[len(opening) :]


def shielded(dialogue: dict[str, Any], *, messages: Sequence[str], arguments: Sequence[str]) -> dict[str, Any]:
    """The same dialogue with tags in message text marked as mere characters: `messages` in what users, systems and
    tools say, `arguments` in the arguments of calls.

    A careful server keeps such text from turning into tokens, a careless one does not, and some do it by halves. The
    model learns them all, so that its answers are the same behind each.
    """
    dialogue = copy.deepcopy(dialogue)
    for message in dialogue["messages"]:
        if message["role"] != "assistant":
            message["content"] = shield(message["content"], messages)
        for call in message.get("tool_calls", []):
            values = json.loads(call["function"]["arguments"])
            values = {key: shield(v, arguments) if isinstance(v, str) else v for key, v in values.items()}
            call["function"]["arguments"] = json.dumps(values, ensure_ascii=False)
    return dialogue


def shield(text: str, tags: Sequence[str]) -> str:
    for tag in tags:
        text = text.replace(tag, tag[0] + SHIELD + tag[1:])
    return text
