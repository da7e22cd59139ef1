"""The exception tree. Every class has a stable code; every message names the cause and the way out.

GlmserveError
├── StartError            ends the process before it serves; exit_code says how
│   ├── ConfigError       a flag, environment variable or config file value is wrong
│   ├── ModelFileError    the model file is missing, damaged or of an unknown kind
│   ├── BundleError       an offline bundle is damaged, incomplete or not for this machine
│   ├── LoadError         llama.cpp refused the model or the context
│   ├── PortError         the address cannot be bound
│   └── FetchError        the model could not be got from the hub
├── RequestError          one request is wrong or cannot be served; api/errors.py maps it to HTTP
│   ├── InvalidRequest    400
│   ├── ContextTooLong    400, carries n_prompt_tokens and n_ctx
│   ├── Unauthorized      401
│   ├── Forbidden         403
│   ├── NotFound          404
│   │   └── ModelNotFound lists the names that are served
│   ├── Conflict          409, what it names is in use just now
│   ├── BodyTooLarge      413
│   ├── QueueFull         429, carries retry_after_s
│   ├── NotSupported      501
│   └── Unavailable       503, carries retry_after_s and, while loading, progress
│       └── QueueTimeout  no slot became free in time
└── EngineFailure         the engine could not go on with a job that had started (500)
"""

from __future__ import annotations

from typing import ClassVar


class GlmserveError(Exception):
    """Base of every error that this project raises on purpose."""

    code: ClassVar[str] = "internal_error"

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else self.code


class StartError(GlmserveError):
    """Ends the process before it serves: one sentence on stderr, no traceback."""

    exit_code: ClassVar[int] = 1


class ConfigError(StartError):
    code = "config_error"
    exit_code = 2


class ModelFileError(StartError):
    code = "model_file_error"
    exit_code = 3


class BundleError(StartError):
    code = "bundle_error"
    exit_code = 3


class LoadError(StartError):
    code = "load_error"
    exit_code = 4


class PortError(StartError):
    code = "port_error"
    exit_code = 5


class FetchError(StartError):
    code = "fetch_error"
    exit_code = 6


class RequestError(GlmserveError):
    """One request is wrong or cannot be served. `param` names the request field at fault, if any."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    pass


class ContextTooLong(RequestError):
    """The prompt leaves no room for one generated token. Counts are tokens."""

    code = "context_length_exceeded"

    def __init__(self, n_prompt_tokens: int, n_ctx: int, *, at_least: bool = False) -> None:
        count = f"at least {n_prompt_tokens}" if at_least else str(n_prompt_tokens)
        super().__init__(
            f"the prompt has {count} tokens, but one request may use {n_ctx} tokens here, the answer "
            f"included; shorten the prompt, or start the server with a larger --ctx-size or a smaller --parallel"
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class Unauthorized(RequestError):
    code = "invalid_api_key"


class Forbidden(RequestError):
    code = "forbidden"


class NotFound(RequestError):
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"

    def __init__(self, asked: str, served: tuple[str, ...]) -> None:
        names = ", ".join(f"'{name}'" for name in served)
        super().__init__(f"the model '{asked}' is not served here; use one of: {names}", param="model")
        self.served = served


class Conflict(RequestError):
    code = "conflict"


class BodyTooLarge(RequestError):
    code = "body_too_large"


class QueueFull(RequestError):
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotSupported(RequestError):
    code = "not_supported"


class Unavailable(RequestError):
    """The engine is loading, restarting or stopping. `progress` is 0..1 while a model loads, else None."""

    code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: int, progress: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.progress = progress


class QueueTimeout(Unavailable):
    """The request waited for a slot as long as it may."""

    code = "queue_timeout"


class EngineFailure(GlmserveError):
    """A job that had started could not go on. `code` of the instance is stable and sent to the client."""

    code = "engine_failure"
