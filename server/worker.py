"""The program of the engine process: `python -m server.worker FD PARENT`. Joins the engine with the plan that is made
before it loads a model; nothing else needs both."""

from __future__ import annotations

import os
import sys

from server.engine.llama import LlamaBackend
from server.engine.messages import DeviceInfo, Planned
from server.engine.options import EngineOptions, LoadPlan
from server.engine.process import EngineProcess, OnProgress, adopt
from server.planning import plan_load


def main(arguments: list[str]) -> int:
    def load(options: EngineOptions, on_progress: OnProgress) -> LlamaBackend:
        return LlamaBackend.load(options, on_progress, plan=plan)

    def plan(options: EngineOptions, devices: list[DeviceInfo]) -> LoadPlan:
        made = plan_load(options, devices)
        if made.lines:
            process.tell(Planned(made.lines))
        return made

    process = EngineProcess(adopt(arguments), load, leave=lambda: os._exit(0))
    return process.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
