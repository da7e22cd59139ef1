"""The fields that every request which generates text shares: sampling, limits, stops, and what the answer shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from server.api.options import GenerationDefaults
from server.api.schemas.fields import (
    FLOAT32_MAX,
    INT32_MAX,
    Body,
    Count,
    CountOrAll,
    Int32,
    Int64,
    Number,
    SoftCount,
    SoftPositive,
    SoftShare,
    first_given,
    given,
    refuse,
    refuse_unsupported,
    shown,
)
from server.api.schemas.forms import FormFields
from server.engine.messages import SamplingOptions
from server.engine.sampler_names import SAMPLER_OF_LETTER
from server.service import GenerationOptions

MAX_CHOICES = 128
MAX_LOGPROBS = 256

_OTHER_SAMPLER_NAMES = {
    "nucleus": "top_p",
    "typicalp": "typ_p",
    "typical": "typ_p",
    "typ": "typ_p",
    "temp": "temperature",
}

# Fields that ask for what this server cannot do, and what to tell. An answer that ignored them would be a wrong one.
UNSUPPORTED = {
    "lora": "LoRA adapters are not supported",
    "n_indent": "is not supported",
    "grammar_lazy": "lazy grammars are not supported; leave it out",
    "response_fields": "is not supported; the whole answer is always sent",
    "stop_token_ids": "is not supported; use 'stop' with texts",
    "min_tokens": "is not supported; use 'ignore_eos' with 'max_tokens'",
    "use_beam_search": "beam search is not supported",
    "best_of": "is not supported; use 'n'",
    "suffix": "is not supported",
    "reasoning_control": "is not supported yet",
}
HARMLESS = {
    "n_indent": (0,),
    "min_tokens": (0,),
    "best_of": (1,),
}


def _stops(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return ()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"must be a text or a list of texts, but got {shown(value)}")
    return tuple(text for text in texts if text)


def _samplers(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, str):
        unknown = [letter for letter in value if letter not in SAMPLER_OF_LETTER]
        names = [SAMPLER_OF_LETTER[letter] for letter in value if letter in SAMPLER_OF_LETTER]
        known = ", ".join(f"{letter} ({name})" for letter, name in SAMPLER_OF_LETTER.items())
    elif isinstance(value, list) and all(isinstance(name, str) for name in value):
        by_name = {name.replace("_", ""): name for name in SAMPLER_OF_LETTER.values()} | _OTHER_SAMPLER_NAMES
        plain = [name.lower().replace("_", "").replace("-", "") for name in value]
        unknown = [name for name, key in zip(value, plain, strict=True) if key not in by_name]
        names = [by_name[key] for key in plain if key in by_name]
        known = ", ".join(SAMPLER_OF_LETTER.values())
    else:
        raise ValueError(f"must be a list of names or a text of letters, but got {shown(value)}")
    if unknown:
        raise ValueError(f"there is no sampler {shown(unknown[0])}; known are {known}")
    return tuple(dict.fromkeys(names))


def _logit_bias(value: Any) -> Any:
    """Pairs of a token id or a text, and its bias. Accepts a list of pairs or an object; false bans."""
    if value is None:
        return ()
    if isinstance(value, dict):
        pairs: list[Any] = [[_key(key), bias] for key, bias in value.items()]
    elif isinstance(value, list):
        pairs = value
    else:
        raise ValueError(f"must be an object or a list of pairs, but got {shown(value)}")
    return tuple(_bias_pair(pair) for pair in pairs)


def _key(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() and len(key) < 11 else key


def _bias_pair(pair: Any) -> tuple[int | str, float]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"must be made of [token, bias] pairs, but got {shown(pair)}")
    token, bias = pair
    if isinstance(token, float) and token.is_integer():
        token = int(token)
    if (
        isinstance(token, bool)
        or not isinstance(token, int | str)
        or (isinstance(token, int) and abs(token) > INT32_MAX)
    ):
        raise ValueError(f"a token is given by its id or its text, but got {shown(token)}")
    if bias is False:
        return token, -math.inf
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= FLOAT32_MAX:
        raise ValueError(f"a bias is a number, or false to ban the token, but got {shown(bias)}")
    return token, float(bias)


MOST_BREAKERS = 32
MOST_BREAKER_CHARS = 40  # llama.cpp looks at no more


def _breakers(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise ValueError(f"must be a list of at least one text, but got {shown(value)}")
    # Each is compared with every token of the vocabulary, in the engine's own thread, while everybody waits.
    if len(value) > MOST_BREAKERS or any(len(text) > MOST_BREAKER_CHARS for text in value):
        raise ValueError(f"must be at most {MOST_BREAKERS} texts of at most {MOST_BREAKER_CHARS} characters")
    return tuple(value)


_TEXTS = {"type": "array", "items": {"type": "string"}}
_BIAS_VALUE = {"anyOf": [{"type": "number"}, {"const": False}]}
_BIAS_SCHEMA = {
    "anyOf": [
        {"type": "object", "additionalProperties": _BIAS_VALUE},
        {
            "type": "array",
            "items": {
                "type": "array",
                "prefixItems": [{"anyOf": [{"type": "integer"}, {"type": "string"}]}, _BIAS_VALUE],
                "minItems": 2,
                "maxItems": 2,
            },
        },
        {"type": "null"},
    ]
}
_STOP_SCHEMA = {"anyOf": [{"type": "string"}, _TEXTS, {"type": "null"}]}
_SAMPLERS_SCHEMA = {
    "anyOf": [
        {"type": "array", "items": {"enum": list(SAMPLER_OF_LETTER.values())}},
        {"type": "string"},
        {"type": "null"},
    ]
}


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send the usage in one last chunk with no choices.")


class GenerationFields(FormFields):
    """Fields with a soft limit are clamped to it, as llama.cpp does; those with a hard limit are refused beyond it."""

    model: str | None = Field(None, description="A name of the served model. Empty or absent: the served model.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    sse_ping_interval: CountOrAll | None = Field(None, description="Seconds between keep-alive comments; -1: none.")

    max_tokens: CountOrAll | None = Field(
        None, description="Tokens to generate at most; -1: until the context is full."
    )
    max_completion_tokens: CountOrAll | None = None
    n_predict: CountOrAll | None = None
    n: Annotated[Int32, Field(ge=1, le=MAX_CHOICES)] | None = Field(None, description="Choices for each prompt.")
    n_cmpl: Annotated[Int32, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops), WithJsonSchema(_STOP_SCHEMA)] = ()
    t_max_predict_ms: Annotated[Int64, Field(ge=-1)] | None = Field(None, description="Longest generation time.")
    ignore_eos: bool | None = None

    seed: Int64 | None = Field(None, description="-1: random. Other seeds are taken modulo 2^32.")
    temperature: SoftPositive | None = None
    dynatemp_range: Number | None = None
    dynatemp_exponent: Number | None = None
    top_k: SoftCount | None = None
    top_p: SoftShare | None = None
    min_p: SoftShare | None = None
    typical_p: Number | None = None
    top_n_sigma: Number | None = None
    xtc_probability: SoftShare | None = None
    xtc_threshold: SoftShare | None = None
    min_keep: Count | None = None
    repeat_penalty: Number | None = None
    repetition_penalty: Number | None = Field(None, description="Another name of repeat_penalty.")
    repeat_last_n: CountOrAll | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    dry_multiplier: Number | None = None
    dry_base: Number | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: CountOrAll | None = None
    dry_sequence_breakers: Annotated[
        tuple[str, ...] | None,
        BeforeValidator(_breakers),
        WithJsonSchema({"anyOf": [{**_TEXTS, "minItems": 1}, {"type": "null"}]}),
    ] = None
    mirostat: SoftCount | None = Field(None, description="0: off; 1 or 2.")
    mirostat_tau: Number | None = None
    mirostat_eta: Number | None = None
    adaptive_target: Number | None = None
    adaptive_decay: Annotated[Number, Field(ge=0.0, le=0.99)] | None = None
    samplers: Annotated[tuple[str, ...] | None, BeforeValidator(_samplers), WithJsonSchema(_SAMPLERS_SCHEMA)] = None
    logit_bias: Annotated[
        tuple[tuple[int | str, float], ...], BeforeValidator(_logit_bias), WithJsonSchema(_BIAS_SCHEMA)
    ] = ()

    n_probs: Annotated[Int32, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    post_sampling_probs: bool | None = None

    priority: Int32 | None = Field(
        None, description="Lower goes first when requests wait for a slot; 0 if absent. A key may have a limit."
    )
    id_slot: CountOrAll | None = Field(None, description="Run in this slot only; -1: in any.")
    cache_prompt: bool | None = None
    return_tokens: bool | None = Field(None, description="Add the ids of the generated tokens.")
    return_progress: bool | None = Field(None, description="Send chunks with prompt_progress while the prompt is read.")
    timings_per_token: bool | None = Field(None, description="Add timings to every chunk.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping):
            refuse_unsupported(raw, UNSUPPORTED, HARMLESS)
        return raw

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        form = self.answer_form
        if form is not None and self.ignore_eos:
            raise refuse(form.field, "is not supported together with 'ignore_eos'")
        if self.n_choices > 1 and self.id_slot is not None and self.id_slot >= 0:
            raise refuse("id_slot", f"one slot cannot run n = {self.n_choices} choices; leave one of them out")
        return self

    @property
    def n_choices(self) -> int:
        return int(first_given(self.n, self.n_cmpl, 1))

    @property
    def ping_interval_s(self) -> float | None:
        """None: the server's own; 0: no pings."""
        return None if self.sse_ping_interval is None else float(max(0, self.sse_ping_interval))

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        limit = first_given(self.n_predict, self.max_completion_tokens, self.max_tokens)
        return None if limit is None else int(limit)

    def generation_options(self, defaults: GenerationDefaults, n_logprobs: int | None) -> GenerationOptions:
        """What the fields ask for, over the server's defaults."""
        return GenerationOptions(
            sampling=self._sampling_options(defaults),
            max_tokens=defaults.max_tokens if self.token_limit is None else self.token_limit,
            n=self.n_choices,
            stop=self.stop,
            n_logprobs=n_logprobs,
            post_sampling_probs=bool(self.post_sampling_probs),
            time_limit_ms=None if self.t_max_predict_ms in (None, -1) else float(self.t_max_predict_ms or 0),
            cache_prompt=first_given(self.cache_prompt, defaults.cache_prompt),
            slot=None if self.id_slot in (None, -1) else self.id_slot,
            report_progress=bool(self.return_progress and self.stream),
            form=self.answer_form,
            text_bias=tuple((token, bias) for token, bias in self.logit_bias if isinstance(token, str)),
        )

    def _sampling_options(self, defaults: GenerationDefaults) -> SamplingOptions:
        sampling = msgspec.structs.replace(defaults.sampling, **self._sampling(defaults))
        # The request's own form, of whatever kind, replaces the server's grammar.
        return sampling if self.answer_form is None else msgspec.structs.replace(sampling, grammar=None)

    def _sampling(self, defaults: GenerationDefaults) -> dict[str, Any]:
        token_bias = tuple((token, bias) for token, bias in self.logit_bias if isinstance(token, int))
        dry_base = self.dry_base if self.dry_base is None or self.dry_base >= 1.0 else defaults.sampling.dry_base
        return given(
            seed=None if self.seed is None else -1 if self.seed == -1 else self.seed % 2**32,
            temperature=self.temperature,
            dynatemp_range=self.dynatemp_range,
            dynatemp_exponent=self.dynatemp_exponent,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            top_n_sigma=self.top_n_sigma,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            min_keep=self.min_keep,
            repeat_penalty=first_given(self.repeat_penalty, self.repetition_penalty),
            repeat_last_n=self.repeat_last_n,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            dry_multiplier=self.dry_multiplier,
            dry_base=dry_base,
            dry_allowed_length=self.dry_allowed_length,
            dry_penalty_last_n=self.dry_penalty_last_n,
            dry_sequence_breakers=self.dry_sequence_breakers,
            mirostat=None if self.mirostat is None else min(self.mirostat, 2),
            mirostat_tau=self.mirostat_tau,
            mirostat_eta=self.mirostat_eta,
            adaptive_target=None if self.adaptive_target is None else min(self.adaptive_target, 1.0),
            adaptive_decay=self.adaptive_decay,
            samplers=self.samplers,
            logit_bias=(*defaults.sampling.logit_bias, *token_bias) if token_bias else None,
            ignore_eos=self.ignore_eos,
            grammar=self.gbnf,
        )
