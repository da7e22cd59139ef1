"""GLM chat templates of our own, for model files whose template is missing or broken, and which of them a model needs.

From 4.7 on all generations share one body (`templates/glm-compact.jinja`); what differs is set in front of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from importlib.resources import files

from server.chat.glm_generation import Generation

PROMPT_START = "[gMASK]"  # a control token; every GLM template writes it

_BODY = "glm-compact.jinja"
_VOCABULARY = frozenset({PROMPT_START, "<|observation|>"})  # control tokens of every GLM
_BY_ARCHITECTURE = {
    "glm4moe": Generation.GLM_4_5,  # 4.7 as well: only its template tells
    "deepseek2": Generation.GLM_4_7,  # 4.7-Flash
    "glm-dsa": Generation.GLM_5_2,  # 5 and 5.1 as well, and the large 5.3
    "glm5-next": Generation.GLM_5_3,
}
_LOW_EFFORT = re.compile(r"""['"]low['"]""")
_NEWLINE_LAYOUT = re.compile(r"(?:\\n|\n)<think>")
_INNER_FUNCTION = re.compile(r"defer_loading|\[['\"]function['\"]\]")


def fallback_template(generation: Generation) -> str:
    """Jinja source. Takes the variables that the generation's own template takes, except those for images."""
    source = _read(f"glm-{generation.value}.jinja")
    return source if generation is Generation.GLM_4_5 else source + _read(_BODY)


def guess_generation(architecture: str, control_texts: Collection[str], template_text: str) -> Generation | None:
    """From the model's own template if it is GLM's, else from architecture and vocabulary; None: not a GLM from 4.5 on.

    `architecture` is llama.cpp's name. Architectures are shared with other families, so the vocabulary has to agree.
    """
    if PROMPT_START in template_text and "<arg_key>" in template_text:
        return _of_template(template_text)
    if not _VOCABULARY.issubset(control_texts):
        return None
    if architecture in _BY_ARCHITECTURE:
        return _BY_ARCHITECTURE[architecture]
    # GLM-4 has the role tags already, but not the tags of calls.
    if architecture.startswith("glm") and "<arg_key>" in control_texts:
        return Generation.GLM_4_5 if architecture == "glm4" else Generation.GLM_5_2
    return None


def has_newline_layout(template_text: str) -> bool:
    """A GLM template that puts reasoning, text and calls on lines of their own, as those of 4.5 and 4.6 do."""
    return _NEWLINE_LAYOUT.search(template_text) is not None


def _of_template(text: str) -> Generation:
    if "Reasoning Effort" in text:
        return Generation.GLM_5_3 if _LOW_EFFORT.search(text) else Generation.GLM_5_2
    if has_newline_layout(text):
        return Generation.GLM_4_5
    return Generation.GLM_5 if _INNER_FUNCTION.search(text) else Generation.GLM_4_7


def _read(name: str) -> str:
    return files("server.chat").joinpath("templates", name).read_text(encoding="utf-8")
