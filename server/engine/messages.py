"""What crosses the border between the HTTP process and the engine process.

Commands go in, events come out. All are frozen structs, encoded as msgpack frames by `engine/wire.py`. Times are
milliseconds, counts are tokens. No roles, no tools, no JSON bodies: the engine knows tokens and text only.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, array_like=False):
    """Base of everything that travels; the class name is the tag on the wire."""


# ── what one job asks for ────────────────────────────────────────────────────────────────────────────────────────────


class SamplingOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. Names, defaults and meaning are llama.cpp's (common/common.h)."""

    seed: int = -1  # -1: a random seed
    temperature: float = 0.8  # <= 0: greedy
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40  # <= 0: whole vocabulary
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_keep: int = 0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # -1: whole context
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64  # -1: whole context
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    samplers: tuple[str, ...] = (
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typ_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
    )
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias); -inf bans the token
    ignore_eos: bool = False
    grammar: str | None = None  # GBNF


class BlockLimit(msgspec.Struct, frozen=True, omit_defaults=True):
    """No more than `n_tokens` in the blocks between two tokens: then `ending`, whose last token is `closer`, is put in
    place of what the model would say."""

    n_tokens: int
    opener: int
    closer: int
    ending: list[int]
    is_open: bool = False  # the prompt ends inside a block


class FreeBlock(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens between `opener` and `closer` (reasoning) are free: neither a constraint nor a grammar looks at them."""

    opener: int
    closer: int
    enders: tuple[int, ...] = ()  # tokens that end an answer for its reader, beside the vocabulary's end tokens
    is_open: bool = False  # the prompt ends inside a block
    may_open: bool = False  # the answer may begin with a block, blanks before it, ahead of what is constrained


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the answer has to look like, in llguidance's Lark. End tokens are allowed where the text is complete."""

    grammar: str
    trigger: int | None = None  # a token: holds from behind it until the text is complete, each time it comes
    forbidden: tuple[str, ...] = ()  # patterns that must not be spelt in ordinary tokens, such as those of tags


class Job(Message, frozen=True):
    """One sequence to continue. `n` choices are `n` jobs that name the first as `same_prompt_as`."""

    id: int
    tokens: list[int]  # the whole prompt, never empty
    sampling: SamplingOptions = SamplingOptions()
    max_tokens: int = -1  # -1: until the context is full
    stop: tuple[str, ...] = ()
    n_logprobs: int | None = None  # None: none; 0: of the chosen token only; k: and the k likeliest
    post_sampling_probs: bool = False
    time_limit_ms: float | None = None  # generation time after which the job stops with LENGTH
    cache_prompt: bool = True
    slot: int | None = None  # run in this slot only (id_slot)
    same_prompt_as: int | None = None  # job whose prefill this one waits for and shares
    report_progress: bool = False  # send Progress events while the prompt is read
    show_special: bool = False  # control tokens appear in the text
    block_limit: BlockLimit | None = None  # of reasoning; with a grammar only where `free_block` is given too
    constraint: Constraint | None = None  # not together with a grammar, nor with ignore_eos unless it has a trigger
    free_block: FreeBlock | None = None
    owner: str = ""  # who asks: the name of an API key, never the key; owners share the slots fairly
    owner_limit: int = 0  # jobs of this owner in slots at once; 0: no limit
    priority: int = 0  # lower goes first
    explain_cache: bool = False  # say where the prompt differs from the nearest one in the cache


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Submit(Message, frozen=True):
    job: Job


class Cancel(Message, frozen=True):
    job_id: int


class Span(msgspec.Struct, frozen=True):
    """A piece of prompt text. `special`: the text of control tokens in it means those tokens."""

    text: str
    special: bool


class Tokenize(Message, frozen=True):
    call_id: int
    spans: list[Span]
    add_special: bool  # let the vocabulary add BOS / EOS as its metadata says


class Detokenize(Message, frozen=True):
    call_id: int
    tokens: list[int]
    show_special: bool = True


class TokenPieces(Message, frozen=True):
    """Ask for the bytes of single tokens."""

    call_id: int
    tokens: list[int]


class Prepare(Message, frozen=True):
    """Compile a constraint ahead of the jobs that have it."""

    call_id: int
    constraint: Constraint


class SlotAction(StrEnum):
    SAVE = "save"
    RESTORE = "restore"
    ERASE = "erase"


class ActOnSlot(Message, frozen=True):
    """`filename`: in the folder of --slot-save-path; empty for ERASE."""

    call_id: int
    slot: int
    action: SlotAction
    filename: str = ""


class Stop(Message, frozen=True):
    """End the engine process; running jobs are failed by the client side. Before, for up to `save_s` seconds, what is
    only in memory goes to disk, where there is a folder for it."""

    save_s: float = 0.0


Question = Tokenize | Detokenize | TokenPieces | Prepare
Command = Submit | Cancel | Question | ActOnSlot | Stop


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class FinishReason(StrEnum):
    END_OF_TURN = "eos"  # an end-of-generation token
    STOP_TEXT = "word"  # one of Job.stop
    LENGTH = "limit"  # max_tokens, time limit or context full


class FailureKind(StrEnum):
    INVALID = "invalid"  # the request is at fault (a grammar that cannot be parsed, say)
    ENGINE = "engine"  # the decode failed or the engine died
    CONTEXT_FULL = "context_full"  # the shared cache cannot hold the job
    CANCELLED = "cancelled"  # the client left
    UNAVAILABLE = "unavailable"  # the engine died before the job had started: nothing was lost, ask again


class Timings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts and clocks of one job. The clock of the prompt starts when the job's first token enters a batch, that of
    the prediction when the decode that yields the first token has returned (llama.cpp's server_slot_stats)."""

    cache_n: int = 0  # prompt tokens taken from the cache
    prompt_n: int = 0  # prompt tokens decoded
    prompt_ms: float = 0.0
    predicted_n: int = 0  # generated tokens, the end token included
    predicted_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    queue_ms: float = 0.0  # from submit to the first batch


class TopToken(msgspec.Struct, frozen=True):
    token: int
    piece: bytes
    logprob: float  # natural logarithm; a probability where post_sampling_probs was asked


class TokenLogprob(msgspec.Struct, frozen=True):
    token: int
    piece: bytes
    logprob: float
    top: list[TopToken] = []


class Divergence(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a prompt stops being like the sequence in the cache that it has most in common with. Texts of a few
    tokens."""

    at: int  # tokens that both have
    before: str  # the last of what both have
    prompt: str  # how the prompt goes on
    cached: str  # how the cached sequence goes on; it may be another client's
    rejoins_after: int | None = None  # after so many tokens of the prompt both are alike again


class Started(Message, frozen=True):
    """The job has a slot and its first batch is about to run."""

    job_id: int
    slot: int
    n_prompt: int
    n_cached: int
    queue_ms: float
    divergence: Divergence | None = None  # where the job asked and the prompt differs from all that is cached


class Progress(Message, frozen=True):
    job_id: int
    n_prompt: int
    n_cached: int
    n_processed: int  # cached tokens included
    time_ms: float


class Text(Message, frozen=True):
    """Valid UTF-8 that is final: nothing held back for a stop string or half a character is in it. `tokens` are the
    tokens sampled since the last Text of this job, `logprobs` one entry each where asked."""

    job_id: int
    text: str
    tokens: list[int]
    timings: Timings
    logprobs: list[TokenLogprob] = []


class Finished(Message, frozen=True):
    job_id: int
    reason: FinishReason
    timings: Timings
    stop_text: str = ""  # the stop string that was met
    truncated: bool = False  # the context was full


class Failed(Message, frozen=True):
    job_id: int
    kind: FailureKind
    message: str
    timings: Timings = Timings()


class Tokens(Message, frozen=True):
    """Answer to Tokenize."""

    call_id: int
    tokens: list[int]


class Detokenized(Message, frozen=True):
    call_id: int
    text: str


class Pieces(Message, frozen=True):
    call_id: int
    pieces: list[bytes]


class Prepared(Message, frozen=True):
    """Answer to Prepare."""

    call_id: int
    refusal: str = ""  # why no job can have the constraint
    warnings: tuple[str, ...] = ()  # what of a schema is not enforced


class CallFailed(Message, frozen=True):
    """A question could not be answered."""

    call_id: int
    message: str


class SlotDone(Message, frozen=True):
    """Answer to ActOnSlot. `n_bytes`: of the file."""

    call_id: int
    n_tokens: int
    n_bytes: int = 0
    ms: float = 0.0


class SlotRefusal(StrEnum):
    INVALID = "invalid"  # the request is at fault
    BUSY = "busy"  # the slot is at work
    FAILED = "failed"


class SlotRefused(Message, frozen=True):
    call_id: int
    reason: SlotRefusal
    message: str
    param: str | None = None  # the request field at fault


class Loading(Message, frozen=True):
    progress: float  # 0..1
    phase: str  # "loading the model", "creating the context", "warming up"


class Planned(Message, frozen=True):
    """What the plan made before the load says, in lines for the log."""

    lines: list[str]


class DeviceInfo(msgspec.Struct, frozen=True):
    name: str
    description: str
    kind: str  # "cpu", "gpu", "igpu", "accel"
    free_bytes: int
    total_bytes: int


class DeviceMemory(msgspec.Struct, frozen=True):
    """What the plan made before a load said of a device, and what llama.cpp holds there: weights, cache and compute
    buffers. `device` "host": the machine's own memory."""

    device: str
    planned_bytes: int
    actual_bytes: int | None  # None: llama.cpp could not be asked


class ModelFacts(msgspec.Struct, frozen=True):
    """What llama.cpp reports after load; never computed from flags."""

    description: str
    architecture: str
    n_ctx: int  # cells in all
    n_ctx_seq: int  # tokens one request may use, prompt and answer
    n_ctx_train: int
    n_slots: int
    n_batch: int
    n_ubatch: int
    n_vocab: int
    vocab_type: int
    n_embd: int
    n_params: int
    size_bytes: int
    ftype: str
    kv_unified: bool
    split_mode: str  # the effective one
    n_gpu_layers: int
    devices: list[DeviceInfo]
    chat_template: str | None
    bos_text: str
    eos_text: str
    adds_bos: bool
    control_texts: list[str]  # the texts of all control tokens of the vocabulary
    build_info: str  # "b<number>-<commit>"; also system_fingerprint
    warnings: list[str] = []
    n_sequences: int = 0  # that the cache can hold, running or retained; 0: one a slot
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    can_cut: bool = True  # a sequence can lose its last tokens; False: recurrent, hybrid or sliding-window memory
    pipelined: bool = False  # several GPUs work on several micro-batches at once
    n_cpu_moe: int = 0
    tensor_split: tuple[float, ...] = ()
    load_mode: str = "auto"
    memory: list[DeviceMemory] = []  # empty: no plan was made

    @property
    def shares_cells(self) -> bool:
        """Sequences can hold the same cells: a prefix costs nothing to have twice."""
        return self.kv_unified and self.can_cut


class Ready(Message, frozen=True):
    facts: ModelFacts
    load_ms: float


class LoadFailed(Message, frozen=True):
    message: str


class SlotState(StrEnum):
    IDLE = "idle"
    WAITING = "waiting"  # for another slot to read the shared prompt
    PREFILL = "prefill"
    GENERATING = "generating"


class SlotView(msgspec.Struct, frozen=True):
    id: int
    state: SlotState
    n_ctx: int
    job_id: int | None = None
    n_prompt: int = 0
    n_processed: int = 0  # prompt tokens in the cache, reused ones included
    n_cached: int = 0
    n_decoded: int = 0  # generated tokens
    n_kept: int = 0  # tokens the slot's sequence holds


class Counters(msgspec.Struct, frozen=True, omit_defaults=True):
    """Monotone since the engine started."""

    n_decode: int = 0  # llama_decode calls
    n_busy_slots: int = 0  # sum over decode calls of the slots in the batch
    prompt_tokens: int = 0  # prompt tokens decoded
    prompt_cached_tokens: int = 0  # prompt tokens reused
    prompt_ms: float = 0.0
    predicted_tokens: int = 0
    predicted_ms: float = 0.0
    jobs_submitted: int = 0
    jobs_finished: int = 0
    jobs_failed: int = 0
    jobs_cancelled: int = 0
    cache_full: int = 0  # decode calls that found no room
    preempted: int = 0
    swapped: int = 0  # of those preempted, the ones whose state went to host memory
    evicted: int = 0  # finished sequences that lost their cells
    cached_tokens_host: int = 0  # of prompt_cached_tokens, those that came from host memory
    cached_tokens_disk: int = 0  # those that came from disk
    follower_waits: int = 0  # jobs that waited for another to read the prompt they share
    rereads_uncuttable: int = 0  # prompts read again because a state could not be cut where they part
    cache_mismatches: int = 0  # sequences dropped because the memory disagreed with the tokens noted
    states_saved: int = 0  # to host memory
    states_refused: int = 0  # damaged, or llama.cpp would not take them back
    disk_written: int = 0  # states written to disk
    disk_refused: int = 0  # files that were damaged
    disk_failed: int = 0  # files that could not be written or read
    n_tokens_max: int = 0  # largest number of tokens one sequence held


class Snapshot(Message, frozen=True):
    """State of the engine at the end of a step; pushed, so that reading it never waits for a decode."""

    slots: list[SlotView]
    n_waiting: int
    counters: Counters
    cells_total: int
    cells_used: int  # shared ones count once
    step_ms: float  # length of the last step
    prefill_tokens_per_s: float  # measured; 0 before the first prompt
    cells_retained: int = 0  # held by finished sequences only
    cells_shared: int = 0  # held by more than one sequence
    n_retained: int = 0  # finished sequences that still hold cells
    host_cache_bytes: int = 0
    host_cache_limit_bytes: int = 0
    host_cache_entries: int = 0
    disk_cache_bytes: int = 0
    disk_cache_limit_bytes: int = 0
    disk_cache_entries: int = 0  # of this model and these settings
    disk_cache_pending: bool = False  # something that is finished is still to be written


class Heartbeat(Message, frozen=True):
    """Sent by the engine's input thread once a second, decode running or not."""

    in_step_ms: float  # how long the current step has been running; 0 between steps
    n_steps: int


Event = (
    Started
    | Progress
    | Text
    | Finished
    | Failed
    | Tokens
    | Detokenized
    | Pieces
    | Prepared
    | CallFailed
    | SlotDone
    | SlotRefused
    | Loading
    | Planned
    | Ready
    | LoadFailed
    | Snapshot
    | Heartbeat
)
JobEvent = Started | Progress | Text | Finished | Failed
