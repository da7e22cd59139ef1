"""OpenAI's text completion: the whole object and its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.api.render.chat import progress
from server.api.render.parts import (
    DONE,
    LEAST_LOGPROB,
    Identity,
    Shows,
    finish_reason,
    frame,
    timings,
    to_json,
    token_probabilities,
    usage,
)
from server.engine.messages import TokenLogprob
from server.generation import ChoiceEnd, ChoiceResult, ChoiceText, Generation, GenerationEvent, PromptProgress


class CompletionWriter:
    """`echoes`: the text of each choice's prompt, where it is to stand before the answer."""

    def __init__(
        self, identity: Identity, generation: Generation, shows: Shows, echoes: Sequence[str] | None = None
    ) -> None:
        self._identity = identity
        self._generation = generation
        self._shows = shows
        self._echoes = list(echoes) if echoes is not None else [""] * len(generation.choices)
        self._offsets = [0] * len(generation.choices)  # characters sent, for text_offset

    def chunk(self, event: GenerationEvent) -> bytes:
        match event:
            case ChoiceText():
                extras = {"timings": timings(event.timings)} if self._shows.timings_per_token else {}
                return self._frame(self._choice(event.choice, event.text, event.tokens, event.logprobs, None), extras)
            case ChoiceEnd():
                extras = {} if self._shows.usage else {"timings": timings(event.timings)}
                reason = finish_reason(event.reason, has_tool_calls=False)
                return self._frame(self._choice(event.choice, "", (), (), reason), extras)
            case PromptProgress():
                empty = {"index": event.choice, "text": "", "logprobs": None, "finish_reason": None}
                return self._frame(empty, {"prompt_progress": progress(event)})

    def last(self) -> bytes:
        if not self._shows.usage:
            return DONE
        generation = self._generation
        tail = {"usage": usage(generation.usage), "timings": timings(generation.choices[0].timings)}
        return frame(to_json({**self._head(), "choices": [], **tail})) + DONE

    def whole(self, results: Sequence[ChoiceResult]) -> bytes:
        generation = self._generation
        choices = [
            self._choice(
                i,
                result.text,
                result.tokens,
                result.logprobs,
                finish_reason(result.end.reason, has_tool_calls=False),
            )
            for i, result in enumerate(results)
        ]
        tail = {"usage": usage(generation.usage), "timings": timings(generation.choices[0].timings)}
        return to_json({**self._head(), "choices": choices, **tail})

    def _choice(
        self, i: int, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        text, self._echoes[i] = self._echoes[i] + text, ""
        choice: dict[str, Any] = {"index": i, "text": text, "logprobs": None, "finish_reason": reason}
        if logprobs:
            choice["logprobs"] = self._logprobs(i, logprobs)
        if self._shows.tokens:
            choice["tokens"] = list(tokens)
        return choice

    def _logprobs(self, i: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """OpenAI's parallel lists, and `content` as llama.cpp has it."""
        texts = [entry.piece.decode("utf-8", "replace") for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[i])
            self._offsets[i] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [max(entry.logprob, LEAST_LOGPROB) for entry in entries],
            "top_logprobs": [
                {top.piece.decode("utf-8", "replace"): max(top.logprob, LEAST_LOGPROB) for top in entry.top}
                for entry in entries
            ],
            "text_offset": offsets,
            "content": token_probabilities(entries, probabilities=self._shows.probabilities),
        }

    def _head(self) -> dict[str, Any]:
        identity = self._identity
        return {
            "id": identity.id,
            "object": "text_completion",
            "created": identity.created,
            "model": identity.model,
            "system_fingerprint": identity.fingerprint,
        }

    def _frame(self, choice: dict[str, Any], extras: dict[str, Any]) -> bytes:
        return frame(to_json({**self._head(), "choices": [choice], **extras}))
