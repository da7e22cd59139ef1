"""How one loaded model is spoken with: the template that writes its prompts, the dialect of its answers. Chosen once,
when the model is ready."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.chat.constraint import Steering, steer_chat
from server.chat.dialects import Dialect, choose_dialect
from server.chat.forms import AnswerForm
from server.chat.glm_generation import Generation
from server.chat.glm_templates import PROMPT_START, fallback_template, guess_generation, has_newline_layout
from server.chat.messages import Conversation, Message, Prompt
from server.chat.options import ChatOptions
from server.chat.tags import Tag
from server.chat.template import CHATML, ChatTemplate, TemplateRefusal
from server.chat.thinking import thinking_variables
from server.chat.turn import TurnReader
from server.errors import ConfigError, InvalidRequest

_QUESTION = Conversation((Message("user", "Hello"),))


@dataclass(frozen=True, slots=True)
class Speaker:
    """What the model file says of itself. `architecture` is llama.cpp's name."""

    architecture: str = ""
    template: str | None = None
    bos_text: str = ""
    eos_text: str = ""
    control_texts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Voice:
    template: ChatTemplate
    dialect: Dialect
    generation: Generation | None
    options: ChatOptions
    bos_text: str

    def render(self, conversation: Conversation) -> Prompt:
        """Raises InvalidRequest when the template refuses."""
        variables = thinking_variables(conversation.thinking, self.generation) | dict(conversation.template_kwargs)
        return self.template.render(dataclasses.replace(conversation, template_kwargs=variables))

    def budget(self, conversation: Conversation) -> tuple[int, str] | None:
        """The most tokens of reasoning and what is then put at its end, if there is a limit."""
        asked, own = conversation.thinking, self.options.thinking
        n_tokens = own.budget if asked.budget is None else asked.budget
        message = own.budget_message if asked.budget_message is None else asked.budget_message
        return None if n_tokens is None or n_tokens < 0 else (n_tokens, message or "")

    def steering(self, conversation: Conversation, form: AnswerForm | None) -> Steering | None:
        """What the answer is held to. Raises InvalidRequest for what cannot be enforced."""
        return steer_chat(conversation, form, self.dialect, tool_grammar=self.options.tool_grammar)

    def may_open_reasoning(self, prompt: Prompt) -> bool:
        """The model itself writes the tag that opens its reasoning, as 4.5 does."""
        return self.generation is not None and prompt.text.rstrip().endswith(Tag.ASSISTANT.value)

    def begins_itself(self, prompt: Prompt) -> bool:
        """The template has written the start of the text, so the vocabulary must not add its BOS as well."""
        starts = tuple(text for text in (self.bos_text, PROMPT_START if self.generation else "") if text)
        return prompt.text.startswith(starts)

    def reader(self, prompt: Prompt, conversation: Conversation) -> TurnReader:
        return TurnReader(
            self.dialect.parser(prompt, conversation.tools if conversation.parse_tool_calls else ()),
            reasoning_format=conversation.reasoning_format or self.options.reasoning_format,
            parallel_tool_calls=conversation.parallel_tool_calls,
        )


def find_voice(speaker: Speaker, options: ChatOptions) -> Voice:
    """The operator's template, else the model's own, else one of ours, else ChatML. Raises ConfigError when the one
    that was given, or the model's where we have none for it, is not valid Jinja."""
    source = options.template or speaker.template or ""
    generation = guess_generation(speaker.architecture, speaker.control_texts, source)
    try:
        defaults = thinking_variables(options.thinking, generation) | dict(options.template_kwargs)
    except InvalidRequest as error:
        raise ConfigError(f"--reasoning-effort: {error.message}") from error
    template = _choose_template(speaker, options, generation, defaults)
    return Voice(template, choose_dialect(generation), generation, options, speaker.bos_text)


def _choose_template(
    speaker: Speaker, options: ChatOptions, generation: Generation | None, defaults: Mapping[str, Any]
) -> ChatTemplate:
    def compiled(source: str, name: str) -> ChatTemplate:
        return ChatTemplate(
            source,
            name=name,
            bos_text=speaker.bos_text,
            eos_text=speaker.eos_text,
            control_texts=speaker.control_texts,
            default_kwargs=defaults,
            newline_layout=generation is not None and has_newline_layout(source),
        )

    if options.template is not None:
        return compiled(options.template, "the chat template given with --chat-template")
    if generation is None:
        if speaker.template:
            return compiled(speaker.template, "the model's chat template")
        return compiled(CHATML, "the fallback chat template (ChatML)")
    why = "the model has none"
    if speaker.template:
        try:
            own = compiled(speaker.template, "the model's chat template")
        except ConfigError as error:
            why = error.message
        else:
            flaw = _flaw(own)
            if flaw is None:
                return own
            why = flaw
    return compiled(fallback_template(generation), f"our own chat template for GLM-{generation.value} ({why})")


def _flaw(template: ChatTemplate) -> str | None:
    """Why a template that compiles cannot render the plainest chat; None: it can, or has a reason not to."""
    try:
        template.render(_QUESTION)
    except InvalidRequest as error:
        return None if isinstance(error.__cause__, TemplateRefusal) else error.message
    return None
