"""What the operator chooses: the context, the devices, and which device holds which block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_CELL_PADDING = 256  # llama_context pads n_ctx and n_ctx_seq to it


@dataclass(frozen=True, slots=True)
class Cells:
    """Sizes of a cache as llama.cpp makes it. `n_streams` caches of `n_ctx_seq` cells."""

    n_ctx: int
    n_ctx_seq: int
    n_streams: int


@dataclass(frozen=True, slots=True)
class ContextChoice:
    """Parameters of a context. Counts are tokens or cells, unless a name says otherwise."""

    n_ctx: int = 0  # cells in all; 0: the model's training context
    n_slots: int = 4
    n_seq_max: int = 0  # sequences that the memory may hold, retained ones too; 0: one for each slot
    kv_unified: bool = True
    n_batch: int = 2048
    n_ubatch: int = 512
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: bool = True
    n_outputs_max: int = 0  # rows of logits in one batch; 0: one for each sequence
    offload_kqv: bool = True  # False: the cache stays on the host
    op_offload: bool = True  # a GPU fetches weights that lie on the host for a prompt's tokens
    swa_full: bool = False
    mtp: bool = False  # a second context for the NextN block, with a cache of its own
    cache_ram_bytes: int = 0  # host memory for sequences that were swapped out (--cache-ram)

    @property
    def n_sequences(self) -> int:
        return max(self.n_seq_max, self.n_slots, 1) if self.kv_unified else max(self.n_slots, 1)

    @property
    def n_outputs(self) -> int:
        """Rows of logits of the reserved graph. llama.cpp asserts that there is one for each sequence, used or not."""
        return max(self.n_outputs_max, self.n_sequences)

    def cells(self, n_ctx_train: int) -> Cells:
        """llama.cpp rounds a unified cache up to 256 cells, and separate ones each (llama_context's constructor)."""
        n_ctx = _padded(self.n_ctx or n_ctx_train)
        if self.kv_unified:
            return Cells(n_ctx, n_ctx, 1)
        n_ctx_seq = _padded(n_ctx // self.n_sequences)
        return Cells(n_ctx_seq * self.n_sequences, n_ctx_seq, self.n_sequences)

    def n_tokens(self, n_ctx_train: int) -> int:
        """Tokens of the graph that llama.cpp reserves: a whole ubatch, a multiple of the sequences."""
        n_ctx = self.n_ctx or n_ctx_train
        n_tokens = min(n_ctx, self.n_batch, self.n_ubatch or self.n_batch)
        return -(-n_tokens // self.n_sequences) * self.n_sequences


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU (or what acts as one) in llama.cpp's order, or the host."""

    name: str  # "CUDA0"
    total_bytes: int
    free_bytes: int
    kind: str = "gpu"  # gpu, igpu, cpu
    description: str = ""
    is_cuda: bool = True  # its flash attention copies a quantised cache to f16; it can pipeline


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model's parts go. Indices count `devices`; None is the host."""

    devices: tuple[Device, ...]
    blocks: tuple[int | None, ...]  # of every block, those that draft too
    output: int | None
    experts_on_host: frozenset[int] = frozenset()  # blocks whose experts stay in the host's memory
    pipelined: bool = False  # llama.cpp's pipeline parallelism: four copies of a graph's inputs

    def blocks_of(self, device: int | None) -> tuple[int, ...]:
        return tuple(index for index, home in enumerate(self.blocks) if home == device)


def place_by_counts(
    devices: Sequence[Device],
    counts: Sequence[int],
    n_blocks: int,
    *,
    n_on_host: int = 0,
    experts_on_host: frozenset[int] = frozenset(),
    pipelined: bool = False,
) -> Placement:
    """The first `n_on_host` blocks on the host, then runs of `counts` on the devices in turn; the output counts as one
    more block, so the counts have to add up to n_blocks + 1 - n_on_host. Raises ValueError when they do not."""
    homes: list[int | None] = [None] * n_on_host
    for device, count in enumerate(counts):
        homes += [device] * count
    if len(homes) != n_blocks + 1:
        raise ValueError(f"{sum(counts)} places for {n_blocks + 1 - n_on_host} blocks, the output among them")
    return Placement(tuple(devices), tuple(homes[:-1]), homes[-1], experts_on_host, pipelined)


def place_on_host(n_blocks: int) -> Placement:
    """Everything on the CPU."""
    return Placement((), (None,) * n_blocks, None)


def _padded(n: int) -> int:
    return -(-n // _CELL_PADDING) * _CELL_PADDING
