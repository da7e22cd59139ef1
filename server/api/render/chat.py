"""OpenAI's chat completion: the whole object and its chunks.

Chunks are put together from bytes that are made once for each answer; only what is new is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.api.render.parts import (
    DONE,
    Identity,
    Shows,
    finish_reason,
    timings,
    to_json,
    token_probabilities,
    usage,
)
from server.chat.messages import (
    ContentDelta,
    Delta,
    ParsedTurn,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from server.engine.messages import TokenLogprob
from server.generation import ChoiceEnd, ChoiceResult, ChoiceText, Generation, GenerationEvent, PromptProgress

_ROLE = b'{"role":"assistant","content":null}'


class ChatWriter:
    def __init__(self, identity: Identity, generation: Generation, shows: Shows) -> None:
        self._identity = identity
        self._generation = generation
        self._shows = shows
        head = to_json(
            {
                "id": identity.id,
                "object": "chat.completion.chunk",
                "created": identity.created,
                "model": identity.model,
                "system_fingerprint": identity.fingerprint,
            }
        )
        self._head = b"data: " + head[:-1]  # the closing brace comes with the rest
        n = len(generation.choices)
        self._began = [False] * n
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(n)]  # of text that the parser holds back
        self._tokens: list[list[int]] = [[] for _ in range(n)]

    # ── chunks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def chunk(self, event: GenerationEvent) -> bytes:
        match event:
            case ChoiceText():
                return self._text(event)
            case ChoiceEnd():
                return self._end(event)
            case PromptProgress():
                return self._progress(event)

    def last(self) -> bytes:
        if not self._shows.usage:
            return DONE
        generation = self._generation
        tail = {"usage": _usage(generation), "timings": timings(generation.choices[0].timings)}
        return self._head + b',"choices":[],' + to_json(tail)[1:] + b"\n\n" + DONE

    def _text(self, event: ChoiceText) -> bytes:
        i = event.choice
        self._logprobs[i] += event.logprobs
        self._tokens[i] += event.tokens
        if not event.deltas:
            return b""
        extras = b',"timings":' + to_json(timings(event.timings)) if self._shows.timings_per_token else b""
        return self._opening(i) + self._deltas(i, event.deltas, extras)

    def _end(self, event: ChoiceEnd) -> bytes:
        i = event.choice
        frames = self._opening(i) + self._deltas(i, event.deltas, b"")
        has_calls = self._generation.choices[i].has_tool_calls
        reason = finish_reason(event.reason, has_tool_calls=has_calls).encode()
        extras = b"" if self._shows.usage else b',"timings":' + to_json(timings(event.timings))
        return frames + self._frame(i, b"{}", self._beside(i), b'"' + reason + b'"', extras)

    def _progress(self, event: PromptProgress) -> bytes:
        return self._frame(event.choice, _ROLE, b"", b"null", b',"prompt_progress":' + to_json(progress(event)))

    def _opening(self, i: int) -> bytes:
        if self._began[i]:
            return b""
        self._began[i] = True
        return self._frame(i, _ROLE, b"", b"null", b"")

    def _deltas(self, i: int, deltas: Sequence[Delta], extras: bytes) -> bytes:
        """One frame for each delta; what belongs to all of them goes into the last."""
        frames = []
        for k, delta in enumerate(deltas):
            final = k == len(deltas) - 1
            frames.append(
                self._frame(i, _delta(delta), self._beside(i) if final else b"", b"null", extras if final else b"")
            )
        return b"".join(frames)

    def _beside(self, i: int) -> bytes:
        """Log-probabilities and token ids that have not been sent yet."""
        beside = b""
        if self._logprobs[i]:
            content = token_probabilities(self._logprobs[i], probabilities=self._shows.probabilities)
            beside += b',"logprobs":' + to_json({"content": content})
            self._logprobs[i] = []
        if self._shows.tokens:
            beside += b',"tokens":' + to_json(self._tokens[i])
        self._tokens[i] = []
        return beside

    def _frame(self, i: int, delta: bytes, beside: bytes, reason: bytes, extras: bytes) -> bytes:
        return b'%s,"choices":[{"index":%d,"delta":%s%s,"finish_reason":%s}]%s}\n\n' % (
            self._head,
            i,
            delta,
            beside,
            reason,
            extras,
        )

    # ── whole ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def whole(self, results: Sequence[ChoiceResult]) -> bytes:
        identity, generation = self._identity, self._generation
        return to_json(
            {
                "id": identity.id,
                "object": "chat.completion",
                "created": identity.created,
                "model": identity.model,
                "system_fingerprint": identity.fingerprint,
                "choices": [self._choice(i, result) for i, result in enumerate(results)],
                "usage": _usage(generation),
                "timings": timings(generation.choices[0].timings),
            }
        )

    def _choice(self, i: int, result: ChoiceResult) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": i,
            "message": _message(result.turn),
            "finish_reason": finish_reason(result.end.reason, has_tool_calls=bool(result.turn.tool_calls)),
        }
        if result.logprobs:
            content = token_probabilities(result.logprobs, probabilities=self._shows.probabilities)
            choice["logprobs"] = {"content": content}
        if self._shows.tokens:
            choice["tokens"] = result.tokens
        return choice


def progress(event: PromptProgress) -> dict[str, Any]:
    return {
        "total": event.n_prompt,
        "cache": event.n_cached,
        "processed": event.n_processed,
        "time_ms": event.time_ms,
    }


def _usage(generation: Generation) -> dict[str, Any]:
    counts = generation.usage
    return usage(counts) | {"completion_tokens_details": {"reasoning_tokens": counts.n_reasoning}}


def _delta(delta: Delta) -> bytes:
    match delta:
        case ContentDelta(text):
            return b'{"content":%s}' % to_json(text)
        case ReasoningDelta(text):
            # Some clients read one name, some the other.
            encoded = to_json(text)
            return b'{"reasoning_content":%s,"reasoning":%s}' % (encoded, encoded)
        case ToolCallStart(index, call_id, name):
            call = {
                "index": index,
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
            return to_json({"tool_calls": [call]})
        case ToolCallArguments(index, fragment):
            return to_json({"tool_calls": [{"index": index, "function": {"arguments": fragment}}]})


def _message(turn: ParsedTurn) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": turn.content if turn.content or not turn.tool_calls else None,
    }
    if turn.reasoning:
        message["reasoning_content"] = message["reasoning"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
    return message
