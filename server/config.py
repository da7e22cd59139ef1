"""What a server is started with: the options of each room, side by side. `cli` builds it, `app` takes it apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.api.options import HttpOptions
from server.chat.options import ChatOptions
from server.engine.options import EngineOptions, SupervisorOptions
from server.ops.options import LogOptions


@dataclass(frozen=True, slots=True)
class Config:
    engine: EngineOptions
    supervisor: SupervisorOptions = field(default_factory=SupervisorOptions)
    http: HttpOptions = field(default_factory=HttpOptions)
    chat: ChatOptions = field(default_factory=ChatOptions)
    log: LogOptions = field(default_factory=LogOptions)
    warnings: tuple[str, ...] = ()  # said once, when logging is up: old flag names and the like
