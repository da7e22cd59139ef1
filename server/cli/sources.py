"""Reads the two other places that flags may be set in: the environment and a TOML file.

In a file the keys are long names without dashes in front (`ctx-size` or `ctx_size`). Tables only group: `port` in a
table `[http]` is `port`. Lists are allowed where a flag takes several values, a table where it takes a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.cli.flag import LLAMA_PREFIX, OWN_PREFIX, Flag
from server.cli.given import Collector, Rank
from server.cli.names import Named, Target, close_to, did_you_mean
from server.cli.special_values import JsonObject
from server.cli.values import BadValue
from server.errors import ConfigError


def read_environment(environment: Mapping[str, str], into: Collector) -> None:
    """An empty variable counts as unset. `LLAMA_ARG_NO_<NAME>` switches off by being there, as in llama.cpp."""
    known: set[str] = set()
    for target in into.names.targets:
        if target.env is None or (isinstance(target, Flag) and target.action and target.key != "config"):
            continue
        off_env = _off_variable(target)
        known |= {target.env, off_env or target.env}
        if off_env and off_env in environment:
            into.take(Named(target, on=False), None, Rank.ENVIRONMENT, off_env)
        elif text := environment.get(target.env):
            into.take(Named(target), text, Rank.ENVIRONMENT, target.env)
    for name in environment:
        if name in known:
            continue
        near = close_to(name, known, cutoff=0.85)
        if name.startswith(LLAMA_PREFIX) or (name.startswith(OWN_PREFIX) and near):
            into.warnings.append(f"the variable {name} is not known and has no effect{did_you_mean(near[:1])}")


def _off_variable(target: Target) -> str | None:
    if target.env and target.off and target.env.startswith(LLAMA_PREFIX):
        return f"{LLAMA_PREFIX}NO_{target.env.removeprefix(LLAMA_PREFIX)}"
    return None


def read_file(path: str, into: Collector) -> None:
    """Raises ConfigError when the file cannot be read, is no TOML, or has a key or value that no flag has."""
    import tomllib  # only where a file is given

    try:
        content = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the file '{path}' of --config cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the file '{path}' of --config is not valid TOML: {error}") from None
    seen: dict[str, str] = {}
    for key, value in _flattened(content, into):
        named = _find_key(key, path, into)
        flag_key = named.target.key if isinstance(named.target, Flag) else key
        if flag_key in seen:
            raise ConfigError(f"{path} sets {flag_key} twice, as {seen[flag_key]} and as {key}; keep one of them")
        seen[flag_key] = key
        _take_value(named, value, f"{key} in {path}", into)


def _flattened(table: Mapping[str, Any], into: Collector) -> list[tuple[str, Any]]:
    """Keys and values of a table and the tables in it, the names of which are dropped."""
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        named = into.names.find(f"--{key}")
        takes_table = named and isinstance(named.target, Flag) and isinstance(named.target.kind, JsonObject)
        if isinstance(value, dict) and not takes_table:
            pairs += _flattened(value, into)
        else:
            pairs.append((key, value))
    return pairs


def _find_key(key: str, path: str, into: Collector) -> Named:
    named = into.names.find(f"--{key}")
    if named is None:
        short = into.names.find(f"-{key}")
        if short and isinstance(short.target, Flag):
            raise ConfigError(f"{path} has the key {key}, but keys are long names: write {short.target.key}")
        near = [name.lstrip("-") for name in into.names.nearest(f"--{key}") if name.startswith("--")]
        raise ConfigError(f"{path} has the unknown key {key}{did_you_mean(near) or '; --help-all lists the names'}")
    if isinstance(named.target, Flag) and named.target.action:
        raise ConfigError(f"{path} has the key {key}, which only the command line can give; remove it from the file")
    return named


def _take_value(named: Named, value: Any, where: str, into: Collector) -> None:
    match value:
        case str():
            texts = [value]
        case bool():
            texts = ["true" if value else "false"]
        case int() | float():
            texts = [str(value)]
        case list() if isinstance(named.target, Flag):
            if not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in value):
                raise ConfigError(f"{where} must be a list of texts or numbers")
            try:
                texts = named.target.kind.join([str(item) for item in value])
            except BadValue as bad:
                raise ConfigError(f"{where} must be {bad}") from None
        case dict():
            try:
                texts = [json.dumps(value)]
            except TypeError:
                raise ConfigError(f"{where} must be a table of texts, numbers, booleans, lists and tables") from None
        case _:
            raise ConfigError(f"{where} is a {type(value).__name__}, which no flag takes; write it as a text")
    for text in texts:
        into.take(named, text, Rank.FILE, where)
