"""The command: arguments in, exit code out. Nothing heavy is imported before it is known that a server must start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from server.cli.commands import Command, find_command
from server.errors import StartError

if TYPE_CHECKING:
    from server.cli.settings import Settings

_HELP = ("-h", "--help", "--usage", "--help-all", "--help_all")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m server`. Every error that has a cause in the start is one line on stderr and an exit code."""
    try:
        return _run(sys.argv[1:] if arguments is None else list(arguments), os.environ)
    except StartError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130  # interrupted before the app's own handlers were in place; 128 + SIGINT
    except BrokenPipeError:
        # The reader of our output (a pager, head) is gone; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str], environment: Mapping[str, str]) -> int:
    if arguments and not arguments[0].startswith("-"):
        command = find_command(arguments[0])
        if command is not None:
            return _run_command(command, arguments[1:], environment)
    asked_for_help = [argument for argument in arguments if argument in _HELP]
    if asked_for_help:
        from server.cli.help import help_text

        sys.stdout.write(help_text(everything="--help-all" in asked_for_help or "--help_all" in asked_for_help))
        sys.stdout.flush()
        return 0
    settings = read_settings(arguments, environment)
    if settings["version"]:
        from server.cli.help import version_text

        sys.stdout.write(version_text())
        return 0
    if settings["print-config"]:
        from server.cli.help import config_text

        for warning in settings.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        sys.stdout.write(config_text(settings))
        sys.stdout.flush()
        return 0
    if settings["list-devices"]:
        from server.app import list_devices

        return list_devices(settings["rpc"] or ())
    from server.cli.build import build_config

    config = build_config(settings)
    from server.app import run

    return run(config)


def _run_command(command: Command, arguments: list[str], environment: Mapping[str, str]) -> int:
    from server.cli.subcommand import read_call, subcommand_help

    module = command.module()
    if any(argument in _HELP for argument in arguments):
        sys.stdout.write(subcommand_help(module.SPEC))
        sys.stdout.flush()
        return 0
    code = module.run(read_call(module.SPEC, arguments, environment))
    assert isinstance(code, int)
    return code


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Flags over environment over file over defaults, settled. Raises ConfigError."""
    from server.cli.given import Collector
    from server.cli.names import Names
    from server.cli.parse import read_arguments
    from server.cli.settings import Settings, settle
    from server.cli.sources import read_environment, read_file

    collector = Collector(Names())
    read_arguments(arguments, collector)
    read_environment(environment, collector)
    files = [given for given in collector.given if given.flag.key == "config"]
    if files:
        read_file(max(files, key=lambda given: given.rank).value, collector)
    settings = Settings(collector.names, collector.given, collector.warnings)
    settle(settings)
    return settings
