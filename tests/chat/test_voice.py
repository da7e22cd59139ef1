"""Which template and dialect a model gets, and what that means for its prompts."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from server.chat.glm import GlmDialect
from server.chat.glm_generation import Generation
from server.chat.glm_templates import fallback_template
from server.chat.messages import Conversation, Message, Prompt, PromptSpan
from server.chat.options import ChatOptions, Thinking
from server.chat.template import CHATML
from server.chat.voice import Speaker, Voice, find_voice
from server.errors import ConfigError, InvalidRequest

GLM_VOCABULARY = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>")
HELLO = (Message("user", "hello"),)


def voice_of(own: str | None, architecture: str = "glm-dsa", **options: Any) -> Voice:
    vocabulary = GLM_VOCABULARY if architecture != "llama" else ("<|im_start|>",)
    return find_voice(Speaker(architecture, own, bos_text="<s>", control_texts=vocabulary), ChatOptions(**options))


@pytest.mark.parametrize(
    ("given", "own", "source", "name"),
    [
        ("A", "B", "A", "the chat template given with --chat-template"),
        (None, "B", "B", "the model's chat template"),
        (None, None, CHATML, "the fallback chat template (ChatML)"),
        (None, "", CHATML, "the fallback chat template (ChatML)"),
    ],
)
def test_the_given_template_wins_then_the_models(given: str | None, own: str | None, source: str, name: str) -> None:
    voice = voice_of(own, "llama", template=given)
    assert (voice.template.source, voice.template.name) == (source, name)
    assert (voice.dialect.name, voice.generation) == ("plain", None)


@pytest.mark.parametrize(
    ("architecture", "generation"),
    [
        ("glm4moe", Generation.GLM_4_5),
        ("deepseek2", Generation.GLM_4_7),
        ("glm-dsa", Generation.GLM_5_2),
        ("glm5-next", Generation.GLM_5_3),
    ],
)
def test_a_glm_without_template_gets_one_of_ours(architecture: str, generation: Generation) -> None:
    voice = voice_of(None, architecture)
    assert voice.template.source == fallback_template(generation)
    assert voice.template.name == f"our own chat template for GLM-{generation.value} (the model has none)"
    assert isinstance(voice.dialect, GlmDialect)
    assert voice.dialect.generation is generation


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("[gMASK]<arg_key>{% if %}", "is not valid Jinja"),
        ("[gMASK]<arg_key>{{ messages[0].content.no.such }}", "cannot render these messages: UndefinedError"),
    ],
)
def test_a_broken_template_of_a_glm_is_replaced_and_told(broken: str, why: str) -> None:
    voice = voice_of(broken, "glm4moe")
    assert voice.template.source == fallback_template(Generation.GLM_4_7)
    assert why in voice.template.name


def test_a_template_that_refuses_is_not_broken() -> None:
    refusing = "[gMASK]<arg_key>{{ raise_exception('no system text') }}"
    voice = voice_of(refusing)
    assert voice.template.source == refusing
    with pytest.raises(InvalidRequest, match="no system text"):
        voice.render(Conversation(HELLO))


def test_nothing_replaces_what_the_operator_gave_or_another_family_has() -> None:
    with pytest.raises(ConfigError, match="given with --chat-template is not valid Jinja"):
        voice_of(None, template="{% if %}")
    with pytest.raises(ConfigError, match="the model's chat template is not valid Jinja"):
        voice_of("{% if %}", "llama")


def test_the_description_says_which_version_of_a_template_it_is() -> None:
    digest = hashlib.sha256("größe".encode()).hexdigest()[:16]
    assert voice_of("größe", "llama").template.description == (
        f"the model's chat template, 5 characters, sha256 {digest}"
    )


def test_the_nearer_word_wins() -> None:
    """From the weakest: the server's thinking and variables, the request's thinking and variables."""
    template = "[gMASK]Reasoning Effort<arg_key>{{ enable_thinking }} {{ reasoning_effort }} {{ clear_thinking }}"
    voice = voice_of(
        template,
        thinking=Thinking(enabled=False, effort="low", clear=False),
        template_kwargs={"clear_thinking": "server"},
    )

    def shown(**fields: Any) -> str:
        return voice.render(Conversation(HELLO, **fields)).text.partition("<arg_key>")[2]

    assert shown() == "False high server"
    assert shown(thinking=Thinking(effort="xhigh")) == "True max server"
    assert shown(thinking=Thinking(clear=True)) == "False high True"
    kwargs = {"clear_thinking": "request", "reasoning_effort": "low"}
    assert shown(thinking=Thinking(clear=True, effort="max"), template_kwargs=kwargs) == "True low request"


def test_an_effort_of_the_server_that_glm_does_not_have() -> None:
    with pytest.raises(ConfigError, match="--reasoning-effort"):
        voice_of(None, thinking=Thinking(effort="ultra"))


@pytest.mark.parametrize(
    ("architecture", "text", "begins"),
    [
        ("glm-dsa", "[gMASK]<sop><|user|>", True),
        ("glm-dsa", "<s>[gMASK]", True),
        ("glm-dsa", "<|user|>", False),
        ("llama", "[gMASK]", False),
        ("llama", "<s>x", True),
    ],
)
def test_no_second_start_is_added(architecture: str, text: str, begins: bool) -> None:
    prompt = Prompt((PromptSpan(text, literal=False),))
    assert voice_of(CHATML, architecture).begins_itself(prompt) is begins
    assert not find_voice(Speaker(template=CHATML), ChatOptions()).begins_itself(prompt)


# ── continuing an assistant turn ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("generation", "final", "thinks", "tail", "opens"),
    [
        (Generation.GLM_4_5, Message("assistant", "Yes"), True, "<|assistant|>\n<think></think>\nYes", False),
        (Generation.GLM_4_5, Message("assistant", "Yes"), False, "<|assistant|>\n<think></think>\nYes", False),
        (Generation.GLM_4_5, Message("assistant", reasoning="Hm"), True, "<|assistant|>\n<think>Hm", True),
        (
            Generation.GLM_4_5,
            Message("assistant", "Yes", reasoning="Hm"),
            True,
            "<|assistant|>\n<think>Hm</think>\nYes",
            False,
        ),
        (Generation.GLM_4_7, Message("assistant", "Yes"), True, "<|assistant|><think></think>Yes", False),
        (Generation.GLM_4_7, Message("assistant", "Yes"), False, "<|assistant|></think>Yes", False),
        (Generation.GLM_5_2, Message("assistant", reasoning="Hm"), True, "<|assistant|><think>Hm", True),
        (Generation.GLM_5_2, Message("assistant", "Yes", reasoning="Hm"), True, "<think>Hm</think>Yes", False),
        (Generation.GLM_5_2, Message("assistant", "Yes"), False, "<|assistant|><think></think>Yes", False),
        (Generation.GLM_5_3, Message("assistant", "Yes"), False, "<|assistant|><think></think>Yes", False),
    ],
)
def test_prefill(generation: Generation, final: Message, thinks: bool, tail: str, opens: bool) -> None:
    voice = voice_of(fallback_template(generation))
    prompt = voice.render(Conversation((*HELLO, final), thinking=Thinking(enabled=thinks), continue_final_message=True))
    assert prompt.text.endswith(tail)
    assert prompt.opens_in_reasoning is opens
