"""What request handlers share: the parts of the running server, and the notes kept of each request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Scope

from server.api.options import ApiKey, HttpOptions, ModelNames
from server.engine.client import EngineClient, EngineState
from server.engine.messages import Timings
from server.errors import ModelNotFound, Unavailable
from server.generation import Generation
from server.ops.metrics import Metrics
from server.ops.record import RequestRecord
from server.service import ChatService

_SHOWN = 100  # characters of an unknown model's name that a message repeats
_NOTES = "glmserve.notes"  # key in the ASGI scope


@dataclass(frozen=True, slots=True)
class Api:
    """The parts that handlers work with."""

    service: ChatService
    engine: EngineClient
    metrics: Metrics
    options: HttpOptions
    started_at: int  # Unix seconds
    model_path: str  # first shard

    @property
    def model_name(self) -> str:
        """What answers call the model, whatever name the request used."""
        return self.options.model_names[0]

    def check_ready(self) -> None:
        """Raises Unavailable unless the engine takes jobs."""
        status = self.engine.status
        if status.state is not EngineState.READY:
            what = {
                EngineState.LOADING: "the model is loading",
                EngineState.RESTARTING: "the engine is being restarted",
                EngineState.STOPPING: "the server is stopping",
            }.get(status.state, "the engine has failed")
            detail = ": ".join(text for text in (what, status.reason or status.phase) if text)
            raise Unavailable(detail, retry_after_s=status.retry_after_s, progress=status.progress)

    def check_model(self, asked: str | None) -> None:
        """Raises ModelNotFound for a name that is not served."""
        if not asked or asked in self.options.model_names or self.options.unknown_model is ModelNames.ANY:
            return
        raise ModelNotFound(asked if len(asked) <= _SHOWN else f"{asked[:_SHOWN]}…", self.options.model_names)


@dataclass(slots=True)
class Notes:
    """What becomes known of a request while it is served; in the end it is a RequestRecord."""

    request_id: str
    client: str = ""
    key: ApiKey | None = None  # which of the server's keys was sent
    route: str = "other"
    method: str = ""
    arrived_at: float = field(default_factory=time.perf_counter)
    status: int = 0
    stream: bool = False
    disconnected: bool = False
    error_code: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    first_text_at: float | None = None
    generation: Generation | None = None

    def record(self) -> RequestRecord:
        now = time.perf_counter()
        choices = self.generation.choices if self.generation is not None else ()
        return RequestRecord(
            route=self.route,
            status=self.status or 499,
            duration_ms=(now - self.arrived_at) * 1e3,
            method=self.method,
            client=self.client,
            key_label=self.key.name if self.key is not None else "",
            request_id=self.request_id,
            stream=self.stream,
            disconnected=self.disconnected,
            normalized=self.generation is not None and self.generation.is_normalized,
            finish_reason="+".join(dict.fromkeys(self.finish_reasons)),
            error_code=self.error_code,
            ttft_ms=None if self.first_text_at is None else (self.first_text_at - self.arrived_at) * 1e3,
            timings=tuple(
                # The engine tells how long a choice has waited when it starts; one that never did waited all the time.
                choice.timings if choice.started else Timings(queue_ms=(now - self.arrived_at) * 1e3)
                for choice in choices
            ),
        )


def api_of(request: Request) -> Api:
    api = request.app.state.api
    assert isinstance(api, Api)
    return api


def notes_of(scope: Scope) -> Notes:
    notes = scope[_NOTES]
    assert isinstance(notes, Notes)
    return notes


def keep_notes(scope: Scope, notes: Notes) -> None:
    scope[_NOTES] = notes
