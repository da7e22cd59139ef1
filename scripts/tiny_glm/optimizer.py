"""Muon for the matrices inside the layers, AdamW for everything else.

Muon replaces the update of a matrix by the nearest matrix whose singular values are all about 1, so that every
direction learns at the same pace. On a model this small it needs several times fewer steps than AdamW alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MUON_RATE = 0.02
MUON_MOMENTUM = 0.95
ADAM_RATE = 4e-3

# Not Muon's: one row per token or per expert, or no matrix at all.
ADAM_NAMES = ("embedding", "head", "router")


def orthogonalized(update: Tensor, iterations: int = 5) -> Tensor:
    """(..., rows, columns) → the same with singular values near 1, by a Newton-Schulz iteration of fifth order."""
    a, b, c = 3.4445, -4.7750, 2.0315  # steep at 0, settles between 0.7 and 1.2
    tall = update.shape[-2] > update.shape[-1]
    x = update.transpose(-2, -1) if tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        square = x @ x.transpose(-2, -1)
        x = a * x + (b * square + c * square @ square) @ x
    return x.transpose(-2, -1) if tall else x


class Optimizer:
    def __init__(self, model: nn.Module) -> None:
        self._matrices: dict[torch.Size, list[nn.Parameter]] = {}  # of one shape: updated as one stack
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and name.rpartition(".")[2] not in ADAM_NAMES:
                self._matrices.setdefault(parameter.shape, []).append(parameter)
            else:
                others.append(parameter)
        self._momenta = {shape: torch.zeros(len(same), *shape) for shape, same in self._matrices.items()}
        self._adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with both rates times `scale`; clears the gradients."""
        for shape, parameters in self._matrices.items():
            gradients = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None])
            momentum = self._momenta[shape].lerp_(gradients, 1 - MUON_MOMENTUM)
            updates = orthogonalized(gradients.lerp(momentum, MUON_MOMENTUM))
            rate = scale * MUON_RATE * max(1.0, shape[-2] / shape[-1]) ** 0.5
            for parameter, update in zip(parameters, updates, strict=True):
                parameter.sub_(update, alpha=rate)
                parameter.grad = None
        for group in self._adam.param_groups:
            group["lr"] = ADAM_RATE * scale
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
