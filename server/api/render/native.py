"""llama.cpp's own completion, /completion: one object for each choice, with the settings it was made with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from server.api.render.chat import progress
from server.api.render.parts import Shows, frame, timings, to_json, token_probabilities
from server.engine.messages import Job
from server.generation import Choice, ChoiceEnd, ChoiceResult, ChoiceText, Generation, GenerationEvent, PromptProgress


class NativeWriter:
    """`prompts`: the text of each choice's prompt."""

    def __init__(
        self, model: str, generation: Generation, shows: Shows, prompts: Sequence[str], *, streams: bool
    ) -> None:
        self._model = model
        self._generation = generation
        self._shows = shows
        self._prompts = prompts
        self._streams = streams
        self._has_new_line = [False] * len(generation.choices)

    def chunk(self, event: GenerationEvent) -> bytes:
        choice = self._generation.choices[event.choice]
        match event:
            case ChoiceText():
                self._has_new_line[event.choice] |= "\n" in event.text
                part = self._part(choice, event.text, event.tokens)
                if event.logprobs:
                    part["completion_probabilities"] = token_probabilities(
                        event.logprobs, probabilities=self._shows.probabilities
                    )
                if self._shows.timings_per_token:
                    part["timings"] = timings(event.timings)
                return frame(to_json(part))
            case PromptProgress():
                return frame(to_json(self._part(choice, "", ()) | {"prompt_progress": progress(event)}))
            case ChoiceEnd():
                return frame(to_json(self._final(choice, event, "", ())))

    def last(self) -> bytes:
        return b""  # these streams just end

    def whole(self, results: Sequence[ChoiceResult]) -> bytes:
        wholes = []
        for choice, result in zip(self._generation.choices, results, strict=True):
            self._has_new_line[choice.index] = "\n" in result.text
            tokens = result.tokens if self._shows.tokens else ()
            whole = self._final(choice, result.end, result.text, tokens)
            if result.logprobs:
                whole["completion_probabilities"] = token_probabilities(
                    result.logprobs, probabilities=self._shows.probabilities
                )
            wholes.append(whole)
        return to_json(wholes[0] if len(wholes) == 1 else wholes)

    def _part(self, choice: Choice, text: str, tokens: Sequence[int]) -> dict[str, Any]:
        return {
            "index": choice.index,
            "content": text,
            "tokens": list(tokens),
            "stop": False,
            "id_slot": _slot(choice),
            "tokens_predicted": choice.timings.predicted_n,
            "tokens_evaluated": choice.n_prompt,
        }

    def _final(self, choice: Choice, end: ChoiceEnd, text: str, tokens: Sequence[int]) -> dict[str, Any]:
        t = end.timings
        return {
            "index": choice.index,
            "content": text,
            "tokens": list(tokens),
            "id_slot": _slot(choice),
            "stop": True,
            "model": self._model,
            "tokens_predicted": t.predicted_n,
            "tokens_evaluated": choice.n_prompt,
            "generation_settings": settings(choice.stream.job, streams=self._streams),
            "prompt": self._prompts[choice.index],
            "has_new_line": self._has_new_line[choice.index],
            "truncated": end.truncated,
            "stop_type": end.reason.value,
            "stopping_word": end.stop_text,
            # The last token was sampled, but there was no need to decode it.
            "tokens_cached": t.cache_n + t.prompt_n + max(0, t.predicted_n - 1),
            "timings": timings(t),
        }


def _slot(choice: Choice) -> int:
    return -1 if choice.slot is None else choice.slot


def settings(job: Job, *, streams: bool, with_texts: bool = True) -> dict[str, Any]:
    """`generation_settings`, and with `with_texts` off the `params` of /slots: nothing a client wrote is in those."""
    sampling = msgspec.structs.asdict(job.sampling)
    bias, grammar = sampling.pop("logit_bias"), sampling.pop("grammar")
    breakers = sampling.pop("dry_sequence_breakers")
    shown = {
        **sampling,
        "max_tokens": job.max_tokens,
        "n_predict": job.max_tokens,
        "n_probs": job.n_logprobs or 0,
        "post_sampling_probs": job.post_sampling_probs,
        "stream": streams,
    }
    if with_texts:
        shown |= {
            "stop": job.stop,
            "grammar": grammar or "",
            "dry_sequence_breakers": breakers,
            "logit_bias": [{"token": token, "bias": value} for token, value in bias],
        }
    return shown
