"""Options of the api room: where it listens, who may ask, what a request gets when it says nothing. Plain values, no
flag names, and nothing of fastapi: the command line builds them before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from server.engine.messages import SamplingOptions


class ModelNames(StrEnum):
    """What happens to a request that names a model which is not served."""

    STRICT = "strict"  # 404 that lists the names served
    ANY = "any"  # served as if it had named ours


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a request that leaves a sampling field out gets."""

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    max_tokens: int = -1  # -1: until the context is full
    cache_prompt: bool = True


@dataclass(frozen=True, slots=True)
class CorsOptions:
    """Cross-origin rules. `*` in `origins` allows every origin (with credentials the caller's own is echoed back),
    `localhost` allows any origin on this machine, whatever its port."""

    origins: tuple[str, ...] = ("*",)
    methods: tuple[str, ...] = ("GET", "POST", "DELETE", "OPTIONS")
    headers: tuple[str, ...] = ("*",)
    credentials: bool = True


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """PEM files; both exist and are readable."""

    key_file: str
    cert_file: str


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that clients may send, and what they may do with it. Keys with one name are one owner in the queue."""

    secret: str = field(repr=False)
    name: str  # for logs, metrics and the queue
    max_jobs: int = 0  # jobs in slots at once; 0: no limit
    priority: int = 0  # lower goes first; what requests get that ask for nothing or for less than this


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """How the HTTP side listens and answers. Times are seconds, sizes bytes."""

    hosts: tuple[str, ...] = ("127.0.0.1",)  # names or addresses; one that ends in .sock: a unix socket's path
    port: int = 8080  # 0: any free port; unused by unix sockets
    prefix: str = ""  # put before every route: "" or "/name", never a trailing slash
    model_names: tuple[str, ...] = ()  # never empty once the command line is through; the first is the model's id
    model_tags: tuple[str, ...] = ()  # informational, shown by /v1/models
    unknown_model: ModelNames = ModelNames.STRICT
    api_keys: tuple[ApiKey, ...] = ()  # empty: no key is asked for
    tls: TlsOptions | None = None
    cors: CorsOptions = field(default_factory=CorsOptions)
    timeout_s: float = 3600.0  # a request without progress for so long is given up; 0: never
    queue_timeout_s: float | None = None  # longest wait for a slot, then 503; None: no limit
    request_limit_s: float | None = None  # longest life of a request, waiting included, then 504; None: no limit
    ping_interval_s: float | None = 30.0  # between keep-alive comments of a silent stream; None: none are sent
    max_body_bytes: int = 64 * 1024 * 1024
    metrics: bool = True  # GET /metrics; off: 501
    props: bool = False  # POST /props; off: 501 (GET /props always answers)
    slots: bool = True  # GET /slots; off: 501
    log_cache_misses: bool = False  # where prompts differ from cached ones, with a few words of both
    slot_actions: bool = False  # POST /slots/{id}; off: 501
    shutdown_grace_s: float = 30.0  # how long running requests may finish after SIGTERM
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
