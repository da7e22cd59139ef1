"""The sub-commands of `python -m server`: a table of names. A command's module is imported only when it is called.

A command NAME is a module server/cli/commands/NAME.py with two things:

    SPEC: Spec                    what it is called with (server/cli/subcommand.py); docs/flags.md is written from it
    def run(call: Call) -> int    does it; returns the exit code, raises StartError with one sentence

and a line in COMMANDS.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    summary: str  # one line of `python -m server --help`

    def module(self) -> ModuleType:
        return importlib.import_module(f"server.cli.commands.{self.name}")


COMMANDS: tuple[Command, ...] = (
    Command("fetch", "get a model from the hub, or go on with one"),
    Command("models", "list the models that there are recipes for, and which are here"),
    Command("plan", "does a model fit, with how much context, with which flags?"),
    Command("verify", "check the files of a model, down to the last byte"),
    Command("bundle", "pack a model for a machine without a network; install it there"),
    Command("doctor", "look at this machine: what it lacks, and what to do about it"),
)


def find_command(name: str) -> Command | None:
    return next((command for command in COMMANDS if command.name == name), None)
