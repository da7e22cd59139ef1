"""Options of the engine room: how the model is loaded and how the step loop behaves. Plain values, no flag names."""

from __future__ import annotations

import msgspec


class TensorOverride(msgspec.Struct, frozen=True):
    """Place tensors whose name matches `pattern` (a regular expression) in `buffer`, a buffer type ("CPU", "CUDA0")."""

    pattern: str
    buffer: str


class ModelOptions(msgspec.Struct, frozen=True):
    """What LlamaBackend needs to load a model and make its context. Counts are tokens, layers or threads."""

    path: str  # first shard
    n_gpu_layers: int | None = None  # None: auto; -1: all
    split_mode: str = "layer"  # none, layer, tensor ("row" has already become "layer")
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    devices: tuple[str, ...] = ()  # names as llama.cpp lists them; empty: all
    tensor_overrides: tuple[TensorOverride, ...] = ()
    cpu_moe: bool = False
    n_cpu_moe: int = 0  # expert tensors of the first N layers stay on the CPU
    pipeline: bool = True  # several GPUs work on several micro-batches at once; costs memory on each
    load_mode: str = "auto"  # auto, none, mmap, mlock, mmap+mlock, dio
    use_extra_bufts: bool = True  # --repack
    no_host: bool = False
    check_tensors: bool = False
    n_ctx: int = 0  # cells in all; 0: the model's training context
    n_slots: int = 4
    kv_unified: bool = True
    n_ctx_slot_max: int = 0  # one request may use no more tokens than this; 0: what the cache gives
    n_batch: int = 2048
    n_ubatch: int = 512
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "auto"  # on, off, auto
    offload_kqv: bool = True
    op_offload: bool = True
    n_threads: int = -1  # -1: as many as llama.cpp's own server would take
    n_threads_batch: int = -1
    numa: str | None = None  # distribute, isolate, numactl
    rope_scaling: str | None = None
    rope_freq_base: float = 0.0  # 0: from the model
    rope_freq_scale: float = 0.0
    warmup: bool = True
    rpc_servers: tuple[str, ...] = ()


class FitOptions(msgspec.Struct, frozen=True):
    """How sizes may give way to the memory that is there. `given` are the fields of ModelOptions that the operator
    chose: they stay."""

    adapts: bool = True  # False: the plan is made and told, but changes nothing and refuses nothing
    least_ctx: int = 4096  # cells that are left when the context gives way
    margin_bytes: tuple[int, ...] = (1 << 30,)  # kept free on each GPU; one value is for all
    pipeline: str = "auto"  # auto, on, off
    experts: bool = True  # experts may go to the CPU
    given: tuple[str, ...] = ()


class SchedulerOptions(msgspec.Struct, frozen=True):
    """How the step loop shares a batch."""

    max_stall_ms: float = 400.0  # target length of a step while anybody generates
    cont_batching: bool = True  # False: prompts are read only while nobody generates
    max_waiting: int = 256  # jobs in the queue; one more is refused with 429
    slot_prompt_similarity: float = 0.1  # least share of a prompt that makes a slot preferred
    cache_ram_bytes: int = 8 << 30  # host memory for states of finished sequences; 0: none
    cache_idle_slots: bool = True  # finished sequences leave the cells to those that run


class DiskOptions(msgspec.Struct, frozen=True):
    """Where states are kept in files. An empty folder name: not at all."""

    cache_folder: str = ""  # of prefixes, for the next start
    cache_limit_bytes: int = 50 << 30
    slot_folder: str = ""  # of slots that clients save


class EngineOptions(msgspec.Struct, frozen=True):
    model: ModelOptions
    scheduler: SchedulerOptions = SchedulerOptions()
    fit: FitOptions = FitOptions()
    disk: DiskOptions = DiskOptions()
    log_level: str = "warn"  # native log lines below it are dropped: error, warn, info, debug


class LoadPlan(msgspec.Struct, frozen=True):
    """What a plan made of EngineOptions. `planned_bytes` are weights, cache and compute buffers by device name, "host"
    among them; `lines` are told before the load, `warnings` again once the model is ready."""

    model: ModelOptions
    planned_bytes: dict[str, int] = {}
    lines: list[str] = []
    warnings: list[str] = []


class SupervisorOptions(msgspec.Struct, frozen=True):
    """How the HTTP side keeps the engine process alive. Times are seconds."""

    step_timeout_s: float = 900.0  # a step that runs longer is taken for a hang; 0: never
    max_failures: int = 5  # engine deaths in a row without one finished job before the server gives up
    backoff_s: float = 0.5  # first wait before a restart; doubles up to 30 s
