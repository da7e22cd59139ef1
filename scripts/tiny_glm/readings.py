"""Other ways to ask the same things, so that the answers do not hang on one exact prompt.

Client libraries write tools in their own style, add a system message, switch thinking off or cut it short. The model
sees each dialogue as it stands and, beside it, in a freshly altered reading. Only the former is promised word for word.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from random import Random
from typing import Any

from scripts.tiny_glm.corpus import Answer, ChatTemplate, answers_of, shield, shielded
from scripts.tiny_glm.tokenizer import CONTROL_TOKENS, TAG_TOKENS

# Their answers depend on the very things that are altered here.
FIXED_KINDS = ("effort", "kept", "dropped", "mistake")

SYSTEM_MESSAGES = ("You are a helpful assistant.", "Be brief.", "Use the tools.", "你是一个助手。")
END_OF_THINKING = "</think>"

Dialogue = dict[str, Any]


class Reader:
    def __init__(self, dialogues: list[Dialogue], template: ChatTemplate, seed: int) -> None:
        self._dialogues = dialogues
        self._template = template
        self._random = Random(seed)
        self._tools = [tool for dialogue in dialogues for tool in dialogue.get("tools", [])]
        answers = [answer for dialogue in dialogues for answer in answers_of(dialogue, template)]
        self._promised = {answer.prompt: answer.text for answer in answers}

    def plain(self) -> list[list[Answer]]:
        """Every dialogue as it stands; tags in message text now as tags, now as characters."""
        return [self._answers(dialogue) for dialogue in self._dialogues]

    def altered(self) -> list[list[Answer]]:
        """Every dialogue that may be altered, altered, without answers that contradict a promised one."""
        readings = []
        for dialogue in self._dialogues:
            if dialogue["kind"] not in FIXED_KINDS:
                answers = [self._maybe_cut_short(answer) for answer in self._answers(self._alter(dialogue))]
                readings.append([a for a in answers if self._promised.get(a.prompt, a.text) == a.text])
        return readings

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _answers(self, dialogue: Dialogue) -> list[Answer]:
        messages, arguments = self._random.choices(((), CONTROL_TOKENS, CONTROL_TOKENS + TAG_TOKENS), k=2)
        dialogue = shielded(dialogue, messages=messages, arguments=arguments)
        answers = answers_of(dialogue, self._template)
        # However the prompt was read: a role tag written as a token would end the answer, except as its last one.
        return [replace(answer, text=shield(answer.text[:-1], CONTROL_TOKENS) + answer.text[-1]) for answer in answers]

    def _alter(self, dialogue: Dialogue) -> Dialogue:
        dialogue = copy.deepcopy(dialogue)
        variables = dialogue.setdefault("template_kwargs", {})
        tools = dialogue.get("tools", [])
        if self._chance(0.3 if tools else 0.15):
            tools = [*tools, self._random.choice(self._tools)]
        self._random.shuffle(tools)
        dialogue["tools"] = [self._restyled(tool) for tool in tools]
        if dialogue["messages"][0]["role"] != "system" and self._chance(0.5):
            dialogue["messages"].insert(0, {"role": "system", "content": self._random.choice(SYSTEM_MESSAGES)})
        if self._chance(0.2):
            variables["reasoning_effort"] = "high"
        if self._chance(0.3):
            variables["enable_thinking"] = not variables.get("enable_thinking", True)
            for message in dialogue["messages"]:
                message.pop("reasoning_content", None)
        return dialogue

    def _restyled(self, tool: dict[str, Any]) -> dict[str, Any]:
        """The same function as another library would describe it: titles, key order, description."""
        function = copy.deepcopy(tool["function"])
        parameters = function.pop("parameters")
        description = function.pop("description")
        if self._chance(0.3):
            description = self._random.choice(self._tools)["function"]["description"]
        if self._chance(0.8):
            function["description"] = description
        if self._chance(0.5):
            for key, schema in parameters["properties"].items():
                parameters["properties"][key] = {"title": key.capitalize(), **schema}
        if self._chance(0.3):
            parameters["title"] = function["name"] + "_args"
        if self._chance(0.3):
            parameters["additionalProperties"] = False
        if self._chance(0.5):
            parameters["type"] = parameters.pop("type")  # last
        function["parameters"] = parameters
        return {"type": "function", "function": function}

    def _maybe_cut_short(self, answer: Answer) -> Answer:
        """A server with a thinking budget closes the thinking somewhere in the middle; what follows is learnt too."""
        thought, closer, rest = answer.text.partition(END_OF_THINKING)
        if not closer or not thought or not self._chance(0.15):
            return answer
        cut = self._random.randrange(len(thought))
        return Answer(answer.dialogue, answer.index, answer.prompt + thought[:cut] + closer, rest)
