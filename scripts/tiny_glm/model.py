"""GLM-5.2's architecture in plain PyTorch, small.

A trunk of decoder layers (multi-head latent attention, then a dense network in the first layers and a mixture of
experts in the others) and one NextN layer, which looks one token further ahead than the trunk and drafts for it.

Shapes: B sequences, T tokens, D width, H heads, E experts, V vocabulary. Weights are stored as llama.cpp keeps them,
(out, in), so that export.py only renames them. The truth this follows is llama.cpp's src/models/glm-dsa.cpp.

Not modelled: the sparse part of the attention. A lightning indexer picks the `indexer_top_k` earlier tokens that a
token may attend to; up to that many tokens it picks all of them, and no dialogue is longer. So export.py writes its
weights at random.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  PyTorch's own abbreviation


@dataclass(frozen=True, slots=True)
class Config:
    n_vocab: int
    width: int = 128
    n_layers: int = 5  # the trunk; one NextN layer comes on top
    n_dense_layers: int = 2  # the first ones have no experts
    dense_hidden: int = 256
    n_experts: int = 8
    n_experts_used: int = 2
    expert_hidden: int = 32
    expert_scale: float = 2.5
    n_heads: int = 4
    q_rank: int = 96
    kv_rank: int = 64
    rope_dim: int = 64
    nope_dim: int = 32
    value_dim: int = 64
    rope_base: float = 8e6
    norm_eps: float = 1e-5
    indexer_heads: int = 4
    indexer_dim: int = 64
    indexer_top_k: int = 2048
    indexer_full: tuple[bool, ...] = (True, True, True, False, False)  # the others reuse the last full layer's choice
    context_length: int = 1_048_576


def matrix(*shape: int) -> nn.Parameter:
    """A weight whose last dimension is the input, with outputs of about unit size."""
    return nn.Parameter(torch.randn(*shape) * shape[-1] ** -0.5)


class RMSNorm(nn.Module):
    """Scale each row to unit mean square, then by a learnt weight per column."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_angles(config: Config, n_tokens: int) -> Tensor:
    """(T, rope_dim / 2) angles: position times a frequency that falls from 1 to about 1 / rope_base."""
    exponents = torch.arange(0, config.rope_dim, 2) / config.rope_dim
    return torch.outer(torch.arange(n_tokens).float(), config.rope_base**-exponents)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of neighbouring columns of x (..., T, rope_dim) by its token's angle."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA).

    Queries, keys and values pass through narrow latent vectors. The cache of a server holds only the kv latent and one
    rotated key part shared by all heads; `k_b` and `v_b` unfold the latent into the keys and values of each head.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = c = config
        self.q_a = matrix(c.q_rank, c.width)
        self.q_a_norm = RMSNorm(c.q_rank, c.norm_eps)
        self.q_b = matrix(c.n_heads * (c.nope_dim + c.rope_dim), c.q_rank)  # per head: plain part, rotated part
        self.kv_a = matrix(c.kv_rank + c.rope_dim, c.width)  # latent, shared rotated key
        self.kv_a_norm = RMSNorm(c.kv_rank, c.norm_eps)
        self.k_b = matrix(c.n_heads, c.nope_dim, c.kv_rank)
        self.v_b = matrix(c.n_heads, c.value_dim, c.kv_rank)
        self.output = matrix(c.width, c.n_heads * c.value_dim)

    def queries(self, x: Tensor, angles: Tensor) -> Tensor:
        """(B, T, D) → (B, H, T, nope + rope)."""
        c = self.config
        q = F.linear(self.q_a_norm(F.linear(x, self.q_a)), self.q_b)
        q = q.unflatten(-1, (c.n_heads, c.nope_dim + c.rope_dim)).transpose(1, 2)
        plain, rotated = q.split((c.nope_dim, c.rope_dim), dim=-1)
        return torch.cat((plain, rotate(rotated, angles)), dim=-1)

    def keys_values(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, D) → keys (B, H, T, nope + rope) and values (B, H, T, value)."""
        c = self.config
        latent, rotated = F.linear(x, self.kv_a).split((c.kv_rank, c.rope_dim), dim=-1)
        latent = self.kv_a_norm(latent)
        plain = F.linear(latent, self.k_b.flatten(0, 1)).unflatten(-1, (c.n_heads, c.nope_dim)).transpose(1, 2)
        values = F.linear(latent, self.v_b.flatten(0, 1)).unflatten(-1, (c.n_heads, c.value_dim)).transpose(1, 2)
        shared = rotate(rotated, angles).unsqueeze(1).expand(-1, c.n_heads, -1, -1)
        return torch.cat((plain, shared), dim=-1), values

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Causal where no mask is given. The scale is 1 / sqrt(nope + rope)."""
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return F.linear(heads.transpose(1, 2).flatten(-2), self.output)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return self.attend(self.queries(x, angles), *self.keys_values(x, angles), mask=None)


class FeedForward(nn.Module):
    """A gated network: down(silu(gate x) * up x)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = matrix(hidden, width)
        self.up = matrix(hidden, width)
        self.down = matrix(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)


class Experts(nn.Module):
    """A mixture of experts with sigmoid gates, plus one shared expert that always runs.

    The experts of a token are the best by gate + bias. The bias is not trained by gradients: it rises for experts that
    are chosen too rarely, which balances their load. The weight of a chosen expert is its gate over the sum of the
    chosen gates, times a fixed scale. Here every expert runs on every token and unwanted ones get the weight 0, which
    for such small experts is faster than sorting the tokens.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = c = config
        self.router = matrix(c.n_experts, c.width)
        self.register_buffer("bias", torch.zeros(c.n_experts))
        self.register_buffer("load", torch.zeros(c.n_experts))  # how often each expert was chosen since the last step
        self.gate = matrix(c.n_experts, c.expert_hidden, c.width)
        self.up = matrix(c.n_experts, c.expert_hidden, c.width)
        self.down = matrix(c.n_experts, c.width, c.expert_hidden)
        self.shared = FeedForward(c.width, c.expert_hidden)

    def weights(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, E): the weight of each expert, 0 for those not chosen."""
        c = self.config
        gates = F.linear(x.float(), self.router.float()).sigmoid()
        chosen = (gates + self.bias).topk(c.n_experts_used, dim=-1).indices
        if self.training:
            self.load += torch.bincount(chosen.flatten(), minlength=c.n_experts)
        picked = gates.gather(-1, chosen)
        picked = picked / picked.sum(-1, keepdim=True).clamp_min(2**-14) * c.expert_scale
        return torch.zeros_like(gates).scatter(-1, chosen, picked).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(F.linear(x, self.gate.flatten(0, 1))) * F.linear(x, self.up.flatten(0, 1))
        hidden = hidden.unflatten(-1, (self.config.n_experts, -1)) * self.weights(x).unsqueeze(-1)
        return F.linear(hidden.flatten(-2), self.down.transpose(0, 1).flatten(1)) + self.shared(x)

    @torch.no_grad()
    def balance(self, step: float) -> None:
        """Move the bias towards an even load."""
        self.bias += step * (self.load.mean() - self.load).sign()
        self.load.zero_()


class Layer(nn.Module):
    def __init__(self, config: Config, *, dense: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = LatentAttention(config)
        self.network_norm = RMSNorm(config.width, config.norm_eps)
        self.network = FeedForward(config.width, config.dense_hidden) if dense else Experts(config)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.network(self.network_norm(x))


class NextN(nn.Module):
    """The draft layer. At position k it reads token k and the hidden state of position k - 1 and predicts token k + 1,
    which the trunk can only predict once it has read token k itself. The embedding and the head are the trunk's."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding_norm = RMSNorm(config.width, config.norm_eps)
        self.hidden_norm = RMSNorm(config.width, config.norm_eps)
        self.join = matrix(config.width, 2 * config.width)
        self.layer = Layer(config, dense=False)
        self.head_norm = RMSNorm(config.width, config.norm_eps)

    def combine(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Join each token with the state (B, T, D) of the position before it; before the first there are zeros."""
        previous = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return F.linear(torch.cat((self.embedding_norm(embedded), self.hidden_norm(previous)), dim=-1), self.join)

    def forward(self, embedded: Tensor, hidden: Tensor, angles: Tensor) -> Tensor:
        """The first draft: hidden states of the trunk → hidden states that predict token k + 1 at position k."""
        return self.head_norm(self.layer(self.combine(embedded, hidden), angles))

    def again(self, embedded: Tensor, hidden: Tensor, drafted: Tensor, angles: Tensor) -> Tensor:
        """The second draft. Token k now comes with the draft layer's own state of position k - 1, while the earlier
        positions are in the cache as the first draft computed them, from the trunk's states."""
        layer, attention = self.layer, self.layer.attention
        x = self.combine(embedded, drafted)
        normed = layer.attention_norm(x)
        keys, values = attention.keys_values(layer.attention_norm(self.combine(embedded, hidden)), angles)
        own_keys, own_values = attention.keys_values(normed, angles)
        n = x.shape[1]
        seen = torch.ones(n, n, dtype=torch.bool).tril(-1)
        mask = torch.cat((seen, torch.eye(n, dtype=torch.bool)), dim=1)
        q = attention.queries(normed, angles)
        x = x + attention.attend(q, torch.cat((keys, own_keys), 2), torch.cat((values, own_values), 2), mask)
        return self.head_norm(x + layer.network(layer.network_norm(x)))


class TinyGlm(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.randn(config.n_vocab, config.width))
        self.layers = nn.ModuleList(Layer(config, dense=i < config.n_dense_layers) for i in range(config.n_layers))
        self.output_norm = RMSNorm(config.width, config.norm_eps)
        self.head = matrix(config.n_vocab, config.width)
        self.nextn = NextN(config)

    def hidden(self, tokens: Tensor) -> Tensor:
        """(B, T) token ids → (B, T, D) states after the output norm, which `logits` turns into a guess of the next."""
        angles = rotary_angles(self.config, tokens.shape[1])
        x = F.embedding(tokens, self.embedding)
        for layer in self.layers:
            x = layer(x, angles)
        return self.output_norm(x)

    def draft(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """States that predict the token after each of `tokens`, given the trunk's states."""
        angles = rotary_angles(self.config, tokens.shape[1])
        return self.nextn(F.embedding(tokens, self.embedding), hidden, angles)

    def draft_again(self, tokens: Tensor, hidden: Tensor, drafted: Tensor) -> Tensor:
        angles = rotary_angles(self.config, tokens.shape[1])
        return self.nextn.again(F.embedding(tokens, self.embedding), hidden, drafted, angles)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head)
