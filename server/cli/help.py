"""What the command line says about itself: --help, --help-all, --version and --print-config."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from server import __version__
from server.cli.commands import COMMANDS
from server.cli.flag import Flag
from server.cli.flags import COMMAND, GROUPS
from server.cli.settings import Settings
from server.cli.values import Whole

WIDTH = 100
_NAMES_WIDTH = 31


def help_text(*, everything: bool) -> str:
    lines = [
        "glmserve: serves a GGUF model over HTTP, in the OpenAI way, with llama.cpp inside.",
        "",
        "  python -m server --gguf model.gguf --parallel 2        python -m server --demo",
        "",
        "Flags have llama.cpp's names. Each has a variable and a key for --config FILE: docs/flags.md.",
    ]
    for group in GROUPS:
        flags = [flag for flag in group.flags if everything or flag.main]
        lines += ["", f"{group.title}:", *(flag_line(flag) for flag in flags)]
    if not everything:
        n_more = sum(not flag.main for group in GROUPS for flag in group.flags)
        lines += ["", f"--help-all shows {n_more} more flags."]
    lines += ["", "Besides serving (python -m server NAME --help tells more):"] if COMMANDS else []
    lines += [f"  {command.name.ljust(_NAMES_WIDTH)}{command.summary}" for command in COMMANDS]
    return "\n".join(lines) + "\n"


def flag_line(flag: Flag) -> str:
    names = spelled(flag)
    column = names.ljust(_NAMES_WIDTH) if len(names) < _NAMES_WIDTH else names + " "
    default = shown_default(flag)
    text = f"{flag.help} [{default}]" if default else flag.help
    return f"  {column}{text}"


def spelled(flag: Flag) -> str:
    """The flag as it is written: short name, long name, value."""
    shorts = [name for name in flag.names if not name.startswith("--")]
    longs = [name for name in flag.names if name.startswith("--")]
    name = ", ".join([*shorts[:1], longs[0]])
    return f"{name} {flag.kind.metavar}".rstrip()


def shown_default(flag: Flag) -> str:
    """The default in few characters; empty where there is none to tell or the help tells it."""
    if flag.default is None or flag.action or "(default" in flag.help:
        return ""
    if isinstance(flag.default, bool):
        return f"on; {flag.off[-1]}" if flag.default and flag.off else ""
    if isinstance(flag.default, float):
        return f"{flag.default:g}"
    if isinstance(flag.default, tuple):
        return ",".join(str(each) for each in flag.default) if len(flag.default) < 3 else ""
    return str(flag.default)


def version_text() -> str:
    import importlib.metadata

    try:
        binding = f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"
    except importlib.metadata.PackageNotFoundError:
        binding = "llama-cpp-python not installed"
    return f"glmserve {__version__} ({binding}, Python {sys.version.split()[0]})\n"


def config_text(settings: Settings) -> str:
    """Every effective value with its origin, as TOML that --config reads back (but for masked secrets)."""
    lines = ["# Effective configuration. It can be used with --config; what is behind # says where a value is from."]
    for group in GROUPS:
        if group is COMMAND:
            continue
        lines += ["", f"[{re.sub(r'[^a-z]+', '-', group.title.lower()).strip('-')}]"]
        for flag in group.flags:
            setting = settings.setting(flag.key)
            if flag.key in ("mlock", "mmap", "direct-io"):
                continue  # folded into load-mode
            lines.append(_config_line(flag, setting.value, setting.where))
    return "\n".join(lines) + "\n"


def _config_line(flag: Flag, value: Any, where: str) -> str:
    plain = flag.kind.plain(value) if value is not None or isinstance(flag.kind, Whole) else None
    if plain is None:
        line = f"# {flag.key} ="
        where = "unset"
    elif flag.secret:
        line = f"# {flag.key} = {masked(value)}"
    else:
        line = f"{flag.key} = {toml(plain)}"
    return f"{line.ljust(46)} # {where}"


def masked(secrets: str | tuple[str, ...]) -> str:
    n = 1 if isinstance(secrets, str) else len(secrets)
    return f"(hidden: {n} {'key' if n == 1 else 'keys'})"


def toml(value: Any) -> str:
    """A TOML literal. JSON's strings are TOML's, once the one control character that JSON leaves bare is escaped."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list():
            return "[" + ", ".join(toml(item) for item in value) + "]"
        case _:
            return str(value)
