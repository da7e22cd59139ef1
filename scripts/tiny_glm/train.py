"""Teach the model its dialogues by heart, in a fixed number of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  PyTorch's own abbreviation

from scripts.tiny_glm.corpus import Answer
from scripts.tiny_glm.model import Config, Experts, TinyGlm
from scripts.tiny_glm.optimizer import Optimizer
from scripts.tiny_glm.readings import Reader
from scripts.tiny_glm.tokenizer import Tokenizer

TOKENS_PER_STEP = 2560
DRAFT_LOSS_WEIGHT = 0.3
BALANCE_STEP = 1e-3


@dataclass(frozen=True, slots=True)
class Plan:
    """The learning rate rises, stays and falls to zero in the last `n_decay` steps."""

    n_steps: int = 1000
    n_warm_up: int = 30
    n_decay: int = 450
    seed: int = 5

    def rate_scale(self, step: int) -> float:
        return min(1.0, (step + 1) / self.n_warm_up, (self.n_steps - step) / self.n_decay)


@dataclass(frozen=True, slots=True)
class Sequence:
    """Tokens of a dialogue; `learnt[i]`: token i is part of an answer."""

    tokens: list[int]
    learnt: list[bool]


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def sequences_of(answers: list[Answer], tokenizer: Tokenizer) -> list[Sequence]:
    """The answers of one dialogue. Those that continue each other's prompts share a sequence."""
    found: list[Sequence] = []
    for answer in sorted(answers, key=lambda answer: -len(answer.prompt)):
        prompt, text = tokenizer.encode(answer.prompt), tokenizer.encode(answer.text)
        tokens, learnt = prompt + text, [False] * len(prompt) + [True] * len(text)
        for sequence in found:
            if sequence.tokens[: len(tokens)] == tokens:
                sequence.learnt[: len(tokens)] = [a or b for a, b in zip(sequence.learnt, learnt, strict=False)]
                break
        else:
            found.append(Sequence(tokens, learnt))
    return found


def batches(reader: Reader, tokenizer: Tokenizer, random: Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, learnt), each (B, T), of like lengths; padding is at the end, where nothing attends to it.
    Each round over the dialogues has them as they stand and altered."""
    while True:
        sequences = [s for reading in reader.plain() + reader.altered() for s in sequences_of(reading, tokenizer)]
        sequences.sort(key=lambda sequence: len(sequence.tokens) * random.uniform(0.85, 1.15))
        groups: list[list[Sequence]] = [[]]
        for sequence in sequences:
            longest = max(len(other.tokens) for other in [*groups[-1], sequence])
            if groups[-1] and longest * (len(groups[-1]) + 1) > TOKENS_PER_STEP:
                groups.append([])
            groups[-1].append(sequence)
        random.shuffle(groups)
        for group in groups:
            n = max(len(sequence.tokens) for sequence in group)
            tokens = [sequence.tokens + [0] * (n - len(sequence.tokens)) for sequence in group]
            learnt = [sequence.learnt + [False] * (n - len(sequence.tokens)) for sequence in group]
            yield torch.tensor(tokens), torch.tensor(learnt)


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def losses(model: TinyGlm, tokens: Tensor, learnt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross-entropy of the answers' tokens: trunk, first draft, second draft."""
    targets = tokens[:, 1:][learnt[:, 1:]]

    def loss(states: Tensor) -> Tensor:
        return F.cross_entropy(model.logits(states[:, :-1][learnt[:, 1:]]).float(), targets)

    hidden = model.hidden(tokens)
    drafted = model.draft(tokens, hidden)
    return loss(hidden), loss(drafted), loss(model.draft_again(tokens, hidden, drafted))


def train(
    reader: Reader, tokenizer: Tokenizer, plan: Plan, report: Callable[[str], None], n_report: int = 50
) -> TinyGlm:
    torch.manual_seed(plan.seed)
    model = TinyGlm(Config(n_vocab=len(tokenizer.vocabulary))).train()
    optimizer = Optimizer(model)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    stream = batches(reader, tokenizer, Random(plan.seed))
    start = time.monotonic()
    sums = torch.zeros(3)
    for step in range(plan.n_steps):
        tokens, learnt = next(stream)
        trunk, first, second = losses(model, tokens, learnt)
        (trunk + DRAFT_LOSS_WEIGHT * (first + second)).backward()
        optimizer.step(plan.rate_scale(step))
        for module in experts:
            module.balance(BALANCE_STEP * plan.rate_scale(step))
        sums += torch.stack((trunk, first, second)).detach()
        if (step + 1) % n_report == 0:
            values = " ".join(f"{value:.4f}" for value in sums / n_report)
            report(f"step {step + 1}: loss {values}, {(time.monotonic() - start) / (step + 1):.2f} s a step")
            sums.zero_()
    return model.eval()


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares of answer tokens that come out likeliest when the text before them is right."""

    trunk: float
    first_draft: float
    second_draft: float
    wrong: int  # answer tokens the trunk gets wrong


@torch.no_grad()
def accuracy(model: TinyGlm, sequences: list[Sequence]) -> Accuracy:
    right = torch.zeros(3)
    counts = torch.zeros(3)
    for sequence in sequences:
        tokens, learnt = torch.tensor([sequence.tokens]), torch.tensor([sequence.learnt])
        hidden = model.hidden(tokens)
        drafted = model.draft(tokens, hidden)
        states = (hidden, drafted, model.draft_again(tokens, hidden, drafted))
        for i, state in enumerate(states):
            # a draft starts from a generated token: the first draft after one, the second after two
            counted = learnt[0, 1:].clone()
            for back in range(i):
                counted[back + 1 :] &= learnt[0, 1 : len(counted) - back]
                counted[: back + 1] = False
            hits = (model.logits(state[0, :-1]).argmax(-1) == tokens[0, 1:])[counted]
            right[i] += hits.sum()
            counts[i] += len(hits)
    return Accuracy(*(right / counts).tolist(), wrong=int(counts[0] - right[0]))
