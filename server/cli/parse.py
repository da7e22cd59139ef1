"""Reads the command line. A flag's value is the next argument, whatever it looks like, unless that is itself the name
of a flag; `--flag=value` works too. Long names are exact: no abbreviations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from server.cli.commands import COMMANDS
from server.cli.flag import Flag
from server.cli.given import Collector, Rank
from server.cli.names import Named, Names, close_to, did_you_mean
from server.errors import ConfigError
from server.store.shards import shard_name, siblings


def read_arguments(arguments: Sequence[str], into: Collector) -> None:
    """Raises ConfigError for an unknown name, a missing value or a value that breaks its rule."""
    names = into.names
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        at += 1
        name, equals, inline = argument.partition("=")
        named = names.find(argument)
        if named is None and equals and argument.startswith("-"):
            named = names.find(name)
        else:
            name, equals = argument, ""
        if named is None:
            if _is_shard_of_the_model(argument, into):
                continue
            raise _unknown(argument, names)
        text = inline if equals else None
        if not equals and named.takes_value:
            following = arguments[at] if at < len(arguments) else None
            if following is None or names.find(following):
                text = _text_of_none(named, name, following, into)
            else:
                text = following
                at += 1
        into.take(named, text, Rank.FLAG, name)


def _is_shard_of_the_model(argument: str, into: Collector) -> bool:
    """The other shards of the model that --gguf names: a shell has put the names in place of a pattern."""
    models = [given.value for given in into.given if given.flag.key == "gguf" and given.rank is Rank.FLAG]
    return bool(models) and shard_name(Path(argument)) is not None and Path(argument) in siblings(Path(models[-1]))


def _text_of_none(named: Named, name: str, following: str | None, into: Collector) -> str | None:
    """The value of a flag that takes one and got none."""
    match named.target:
        case Flag(bare=str(bare), bare_is_old=False):
            return bare
        case Flag(bare=str(bare)):
            into.warnings.append(f"{name} without a value counts as {name} {bare}")
            return bare
        case Flag(kind=kind):
            sample, rule = kind.sample, f"{kind.rule}; "
        case _:
            sample, rule = "VALUE", ""
    if following is None:
        raise ConfigError(f"{name} needs a value: {rule}for example {name} {sample}")
    raise ConfigError(
        f"{name} needs a value, but the flag {following} follows it: {rule}"
        f"for example {name} {sample} (or {name}={following} if that is the value)"
    )


def _unknown(argument: str, names: Names) -> ConfigError:
    name = argument.partition("=")[0]
    if argument.startswith("-") and len(argument) > 1:
        hint = did_you_mean(names.nearest(name)) or "; --help-all lists all flags"
        return ConfigError(f"there is no flag {name}{hint}")
    if argument.endswith(".gguf") or Path(argument).exists():
        return ConfigError(f"'{argument}' stands alone; if it is the model, write --gguf {argument}")
    near = close_to(argument, [command.name for command in COMMANDS])
    if near:
        return ConfigError(f"'{argument}' is no command; did you mean python -m server {near[0]}?")
    return ConfigError(f"'{argument}' stands alone, but every argument belongs to a flag; --help lists the flags")
