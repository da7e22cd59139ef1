from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from server.chat.messages import ContentDelta, Conversation, Message, ParsedTurn
from server.chat.options import ChatOptions
from server.engine.client import EngineClient
from server.engine.messages import Failed, FailureKind, FinishReason, SamplingOptions
from server.engine.options import SchedulerOptions
from server.errors import (
    ConfigError,
    ContextTooLong,
    EngineFailure,
    InvalidRequest,
    NotSupported,
    QueueFull,
    Unavailable,
)
from server.generation import ChoiceEnd, ChoiceText, Generation, PromptProgress, collect
from server.service import ChatService, GenerationOptions, check_tokens
from tests.support.engine import scripted_client
from tests.support.http import CONCAT, Gate, assert_idle
from tests.support.scripted import ScriptedBackend

HELLO = Conversation((Message("user", "hello"),))


def echo() -> ScriptedBackend:
    return ScriptedBackend(reply=lambda prompt: f"<{prompt}>", chat_template=CONCAT)


@asynccontextmanager
async def service_of(
    backend: ScriptedBackend | None = None, scheduler: SchedulerOptions | None = None, **chat: object
) -> AsyncIterator[tuple[ChatService, EngineClient]]:
    async with scripted_client(backend or echo(), scheduler) as engine:
        yield ChatService(engine, ChatOptions(**chat)), engine  # type: ignore[arg-type]


async def whole(generation: Generation) -> list[str]:
    async with generation:
        return [result.text for result in await collect(generation, len(generation.choices))]


# ── one path ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_chat_yields_its_text_and_one_end() -> None:
    async with service_of() as (service, _), await service.open_chat(HELLO, GenerationOptions()) as generation:
        events = [event async for event in generation]
    texts = [event for event in events if isinstance(event, ChoiceText)]
    assert "".join(text.text for text in texts) == "<hello>"
    assert all(text.deltas == [ContentDelta(text.text)] for text in texts)
    end = events[-1]
    assert isinstance(end, ChoiceEnd)
    assert (end.choice, end.reason, end.truncated) == (0, FinishReason.END_OF_TURN, False)
    assert sum(isinstance(event, ChoiceEnd) for event in events) == 1
    usage = generation.usage
    assert (usage.n_prompt, usage.n_cached, usage.n_generated) == (5, 0, 8)  # the end token is counted


async def test_collect_is_the_fold_of_the_same_events() -> None:
    async with service_of() as (service, _), await service.open_chat(HELLO, GenerationOptions()) as generation:
        (result,) = await collect(generation, 1)
    assert result.turn == ParsedTurn(content="<hello>")
    assert bytes(result.tokens) == b"<hello>"


async def test_choices_share_one_prompt_and_are_counted_once() -> None:
    async with service_of() as (service, _):
        generation = await service.open_chat(HELLO, GenerationOptions(n=3))
        assert await whole(generation) == ["<hello>"] * 3
        assert [choice.stream.job.same_prompt_as for choice in generation.choices[1:]] == [
            generation.choices[0].stream.job.id
        ] * 2
    assert (generation.usage.n_prompt, generation.usage.n_generated) == (5, 24)


async def test_raw_prompts_of_every_form() -> None:
    async with service_of() as (service, _):
        prompts = (("a",), ((98, 99),), ("d", (101,)))
        generation = await service.open_completion(prompts, GenerationOptions(n=2))
        assert await whole(generation) == ["<a>", "<a>", "<bc>", "<bc>", "<de>", "<de>"]
    assert generation.usage.n_prompt == 5


async def test_options_reach_the_job() -> None:
    options = GenerationOptions(
        sampling=SamplingOptions(temperature=0.0, seed=7),
        max_tokens=3,
        stop=("zz",),
        n_logprobs=2,
        time_limit_ms=5e5,
        cache_prompt=False,
        slot=1,
        report_progress=True,
    )
    async with service_of() as (service, _), await service.open_chat(HELLO, options) as generation:
        events = [event async for event in generation]
        job = generation.choices[0].stream.job
    assert (job.max_tokens, job.stop, job.n_logprobs, job.slot) == (3, ("zz",), 2, 1)
    assert (job.sampling.seed, job.cache_prompt, job.time_limit_ms, job.show_special) == (7, False, 5e5, False)
    assert isinstance(events[0], PromptProgress)
    assert all(len(event.logprobs) == 1 for event in events if isinstance(event, ChoiceText))
    assert generation.choices[0].slot == 1


async def test_bias_of_a_text_is_given_to_each_of_its_tokens() -> None:
    options = GenerationOptions(sampling=SamplingOptions(logit_bias=((5, 1.0),)), text_bias=(("ab", -2.0),))
    async with service_of() as (service, _), await service.open_chat(HELLO, options) as generation:
        assert generation.choices[0].stream.job.sampling.logit_bias == ((5, 1.0), (97, -2.0), (98, -2.0))


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_control_texts_of_a_client_are_characters_those_of_the_template_tokens() -> None:
    backend = ScriptedBackend(reply=lambda _: "x", chat_template="<|user|>{{ messages[0].content }}<|assistant|>")
    async with service_of(backend) as (service, _):
        generation = await service.open_chat(Conversation((Message("user", "<|user|>!"),)), GenerationOptions())
        await whole(generation)
    assert generation.prompts == [[257, *b"<|user|>!", 258]]


async def test_count_is_what_the_chat_costs() -> None:
    async with service_of() as (service, _):
        generation = await service.open_chat(HELLO, GenerationOptions())
        assert await service.count(HELLO) == generation.usage.n_prompt
        generation.close()


async def test_the_prompt_and_one_token_must_fit() -> None:
    async with service_of(ScriptedBackend(reply=lambda _: "x", n_ctx=8, chat_template=CONCAT)) as (service, _):
        await whole(await service.open_chat(Conversation((Message("user", "1234567"),)), GenerationOptions()))
        with pytest.raises(ContextTooLong) as caught:
            await service.open_chat(Conversation((Message("user", "12345678"),)), GenerationOptions())
    assert (caught.value.n_prompt_tokens, caught.value.n_ctx) == (8, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (GenerationOptions(slot=4), "slots are 0 to 3"),
        (GenerationOptions(sampling=SamplingOptions(logit_bias=((261, 1.0),))), "token 261 is not in the vocabulary"),
        (GenerationOptions(sampling=SamplingOptions(logit_bias=((-1, 1.0),))), "token -1 is not in the vocabulary"),
    ],
)
async def test_what_the_model_has_not(options: GenerationOptions, words: str) -> None:
    async with service_of() as (service, engine):
        with pytest.raises(InvalidRequest, match=words):
            await service.open_chat(HELLO, options)
        assert not engine.jobs


async def test_empty_and_unknown_prompts() -> None:
    async with service_of() as (service, engine):
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            await service.open_completion([("",)], GenerationOptions())
        with pytest.raises(InvalidRequest, match="token 999 is not in the vocabulary"):
            await service.open_completion([((999,),)], GenerationOptions())
        with pytest.raises(InvalidRequest, match="token -1"):
            check_tokens([1, -1], engine.facts)


# ── templates ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_broken_template_of_the_model_is_told_at_start_and_to_clients() -> None:
    async with service_of(ScriptedBackend(chat_template="{% if %}")) as (service, _):
        with pytest.raises(ConfigError, match="the model's chat template is not valid Jinja"):
            service.prepare()
        with pytest.raises(NotSupported, match="--chat-template-file"):
            await service.open_chat(HELLO, GenerationOptions())


async def test_the_given_template_and_its_kwargs_are_used() -> None:
    async with service_of(template="{{ a }}!", template_kwargs={"a": 1}) as (service, _):
        assert service.prepare().source == "{{ a }}!"
        assert service.render(HELLO).text == "1!"
        assert service.render(Conversation(HELLO.messages, template_kwargs={"a": 2})).text == "2!"


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_leaving_cancels_every_job() -> None:
    async with service_of(ScriptedBackend(chat_template=CONCAT)) as (service, engine):  # generates without end
        async with await service.open_chat(HELLO, GenerationOptions(n=2)) as generation:
            async for event in generation:
                if isinstance(event, ChoiceText):
                    break
        generation.close()  # once more does no harm
        await assert_idle(engine)
        assert engine.snapshot is not None
        assert engine.snapshot.counters.jobs_cancelled == 2


async def test_a_full_queue_leaves_nothing_behind() -> None:
    gate = Gate()
    backend = ScriptedBackend(reply=lambda _: "x", n_slots=1, on_decode=gate, chat_template=CONCAT)
    async with service_of(backend, SchedulerOptions(max_waiting=1)) as (service, engine):
        first = await service.open_chat(HELLO, GenerationOptions())
        with pytest.raises(QueueFull) as caught:
            await service.open_chat(HELLO, GenerationOptions(n=2))
        assert caught.value.retry_after_s >= 1
        gate.open()
        assert await whole(first) == ["x"]
        await assert_idle(engine)


async def test_a_bad_grammar_is_the_clients_fault() -> None:
    async with service_of() as (service, _):
        generation = await service.open_chat(HELLO, GenerationOptions(sampling=SamplingOptions(grammar="bad")))
        with pytest.raises(InvalidRequest, match="the grammar cannot be parsed"):
            await whole(generation)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FailureKind.INVALID, InvalidRequest),
        (FailureKind.ENGINE, EngineFailure),
        (FailureKind.CONTEXT_FULL, Unavailable),
        (FailureKind.UNAVAILABLE, Unavailable),
        (FailureKind.CANCELLED, EngineFailure),
    ],
)
async def test_every_failure_ends_the_generation_with_its_error(kind: FailureKind, error: type[Exception]) -> None:
    gate = Gate()
    backend = ScriptedBackend(reply=lambda _: "x", on_decode=gate, chat_template=CONCAT)
    async with (
        service_of(backend) as (service, _),
        await service.open_chat(HELLO, GenerationOptions(n=2)) as generation,
    ):
        stream = generation.choices[1].stream
        stream.push(Failed(stream.job.id, kind, "because"))
        gate.open()
        with pytest.raises(error):
            await collect(generation, 2)


async def test_when_the_engine_dies_those_who_wait_may_come_again() -> None:
    gate = Gate()
    backend = ScriptedBackend(n_slots=1, chat_template=CONCAT)
    async with service_of(backend) as (service, engine):
        running = await service.open_chat(HELLO, GenerationOptions())
        assert isinstance(await anext(running), ChoiceText)
        backend.on_decode = gate
        await gate.entered(engine)
        waiting = await service.open_chat(HELLO, GenerationOptions())
        assert waiting.waits_in_queue
        assert not running.waits_in_queue
        engine.fail_all("it was killed")
        with pytest.raises(EngineFailure, match="it was killed"):
            await collect(running, 1)
        with pytest.raises(Unavailable, match="it was killed"):
            await collect(waiting, 1)
        gate.open()


async def test_a_prompt_that_no_vocabulary_could_fit_is_refused_uncounted() -> None:
    class Uncounted(ScriptedBackend):
        def tokenize(self, *_: object, **__: object) -> list[int]:
            raise AssertionError("tokenised")

    async with service_of(Uncounted(n_ctx=64, n_slots=1, chat_template=CONCAT)) as (service, _):
        text = "x" * (64 * 128 + 1)
        with pytest.raises(ContextTooLong, match="at least 64 tokens, but one request may use 64"):
            await service.open_chat(Conversation((Message("user", text),)), GenerationOptions())
        with pytest.raises(ContextTooLong, match="at least 64 tokens"):
            await service.open_completion([(text,)], GenerationOptions())


async def test_more_answers_than_the_server_takes_at_once_are_the_requests_own_fault() -> None:
    async with service_of(scheduler=SchedulerOptions(max_waiting=3)) as (service, engine):
        assert engine.capacity == 7
        with pytest.raises(InvalidRequest, match="asks for 8 answers, but 7 are the most"):
            await service.open_completion([("hi",)] * 8, GenerationOptions())
        assert len(await whole(await service.open_completion([("hi",)] * 7, GenerationOptions()))) == 7
