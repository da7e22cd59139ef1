"""How a sub-command is called: its places, flags and verbs as a table; reading them and showing them.

The rules are those of the server's own command line (server/cli/parse.py): a flag's value is the next argument unless
that is the name of a flag, `--flag=value` works too, `_` counts as `-`, long names are exact, the last mention counts.
An argument that belongs to no flag fills the next place; behind `--` every argument does. Variables are read only where
a flag names one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.cli.flag import Flag, Group
from server.cli.given import read_value
from server.cli.names import close_to, did_you_mean
from server.cli.values import Kind, Switch
from server.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """An argument without a flag. `many`: the last place may take any number."""

    name: str  # as shown: NAME, PATH
    help: str
    required: bool = True
    many: bool = False


@dataclass(frozen=True, slots=True)
class Spec:
    """`about` is one line; `notes` are lines below the flags. With `verbs` the first argument chooses one of them, each
    a Spec of its own with the verb as its name, and the command itself has neither places nor flags."""

    name: str
    about: str
    places: tuple[Place, ...] = ()
    groups: tuple[Group, ...] = ()
    notes: tuple[str, ...] = ()
    verbs: tuple[Spec, ...] = ()
    server_flags: bool = False  # every other argument is a flag of the server; run() reads Call.rest with read_settings

    @property
    def flags(self) -> tuple[Flag, ...]:
        return tuple(flag for group in self.groups for flag in group.flags)


@dataclass(frozen=True, slots=True)
class Call:
    """What a sub-command was called with. Flags by key, places by name in lower case (left out: None; many: tuple)."""

    verb: str | None
    values: Mapping[str, Any]
    given: frozenset[str]  # the keys of flags that the command line or the environment gave
    environment: Mapping[str, str]
    rest: tuple[str, ...] = field(default=())

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


def option(
    names: str,
    kind: Kind,
    default: Any,
    help: str,
    *,
    note: str = "",
    env: str = "",
    off: str = "",
    secret: bool = False,
) -> Flag:
    """A flag of a sub-command; `names` and `off` are separated by spaces."""
    all_names = tuple(names.split())
    key = next(name for name in all_names if name.startswith("--"))[2:]
    return Flag(key, all_names, kind, default, help, env, note, tuple(off.split()), main=True, secret=secret)


def models_dir_option() -> Flag:
    """For sub-commands that look where `fetch` puts models, or put them there."""
    return option(
        "--models-dir",
        Kind(metavar="DIR", sample="/models"),
        None,
        "folder of all models (default: ~/.cache/glmserve/models)",
        env="GLMSERVE_MODELS_DIR",
    )


def read_call(spec: Spec, arguments: Sequence[str], environment: Mapping[str, str]) -> Call:
    """Raises ConfigError for an unknown name, a missing value or place, or a value that breaks its rule."""
    command, verb = f"python -m server {spec.name}", None
    if spec.verbs:
        spec, arguments = _verb_of(spec, arguments)
        verb, command = spec.name, f"{command} {spec.name}"
    reader = _Reader(spec, command, environment)
    reader.read(arguments)
    return Call(verb, reader.values(), frozenset(reader.given), environment, tuple(reader.rest))


def _verb_of(spec: Spec, arguments: Sequence[str]) -> tuple[Spec, Sequence[str]]:
    names = [verb.name for verb in spec.verbs]
    listed = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
    if not arguments:
        raise ConfigError(f"python -m server {spec.name} needs to be told what to do: {listed}")
    for verb in spec.verbs:
        if verb.name == arguments[0]:
            return verb, arguments[1:]
    hint = did_you_mean(close_to(arguments[0], names)[:1]) or f"; it does {listed}"
    raise ConfigError(f"python -m server {spec.name} does not know '{arguments[0]}'{hint}")


class _Reader:
    def __init__(self, spec: Spec, command: str, environment: Mapping[str, str]) -> None:
        self._spec = spec
        self._command = command
        self._by_name = {name: (flag, True) for flag in spec.flags for name in flag.names}
        self._by_name |= {name: (flag, False) for flag in spec.flags for name in flag.off}
        self.given: dict[str, Any] = {}
        self._texts: list[str] = []
        self.rest: list[str] = []
        for flag in spec.flags:
            if flag.env and (text := environment.get(flag.env)):
                self.given[flag.key] = read_value(flag.kind, text, flag.env, secret=flag.secret)

    def read(self, arguments: Sequence[str]) -> None:
        at, repeated = 0, set[str]()
        while at < len(arguments):
            argument = arguments[at]
            at += 1
            name, equals, text = argument.partition("=")
            found = self._find(name)
            if argument == "--" and not self._spec.server_flags:
                self._texts += arguments[at:]
                return
            if found is None:
                self._take_unknown(argument)
                continue
            flag, on = found
            if flag.kind.takes_value:
                if not equals:
                    if at == len(arguments) or self._find(arguments[at]):
                        raise ConfigError(
                            f"{name} needs a value: {flag.kind.rule}; for example {name} {flag.kind.sample}"
                        )
                    text = arguments[at]
                    at += 1
            elif not equals:
                text = "on"
            value = read_value(flag.kind, text, name, secret=flag.secret)
            if isinstance(flag.kind, Switch) and not on:
                value = not value
            if flag.kind.repeats and flag.key in repeated:
                value = (*self.given[flag.key], *value)
            repeated.add(flag.key)
            self.given[flag.key] = value

    def _find(self, name: str) -> tuple[Flag, bool] | None:
        return self._by_name.get(name.replace("_", "-") if name.startswith("--") else name)

    def _take_unknown(self, argument: str) -> None:
        if self._spec.server_flags:
            self.rest.append(argument)
        elif argument.startswith("-") and len(argument) > 1:
            name = argument.partition("=")[0]
            hint = did_you_mean(close_to(name, self._by_name)) or f"; {self._command} --help lists its flags"
            raise ConfigError(f"{self._command} has no flag {name}{hint}")
        else:
            self._texts.append(argument)

    def values(self) -> dict[str, Any]:
        values = {flag.key: self.given.get(flag.key, flag.default) for flag in self._spec.flags}
        texts = list(self._texts)
        for place in self._spec.places:
            key = place.name.lower()
            if place.required and not texts:
                raise ConfigError(f"{self._command} needs {place.name}: {place.help}")
            if place.many:
                values[key], texts = tuple(texts), []
            else:
                values[key] = texts.pop(0) if texts else None
        if texts:
            takes = " ".join(place.name for place in self._spec.places) or "nothing"
            raise ConfigError(f"{self._command} takes {takes}, and flags; '{texts[0]}' is one argument too many")
        return values


# ── help ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

HELP_NAMES_WIDTH = 31


def usage(spec: Spec, command: str = "python -m server") -> str:
    """The line that shows how it is called."""
    if spec.verbs:
        return f"{command} {spec.name} {'|'.join(verb.name for verb in spec.verbs)} …"
    places = [place.name + ("…" if place.many else "") for place in spec.places]
    shown = [text if place.required else f"[{text}]" for place, text in zip(spec.places, places, strict=True)]
    flags = ["[flags]"] if spec.groups or spec.server_flags else []
    return " ".join([command, spec.name, *shown, *flags])


def subcommand_help(spec: Spec, command: str = "python -m server") -> str:
    """What `python -m server NAME --help` prints; with verbs, all of them one below the other."""
    lines = [usage(spec, command), f"  {spec.about}"]
    for verb in spec.verbs:
        lines += ["", subcommand_help(verb, f"{command} {spec.name}").rstrip("\n")]
    if spec.places:
        lines += ["", *(f"  {place.name.ljust(HELP_NAMES_WIDTH)}{place.help}" for place in spec.places)]
    from server.cli.help import flag_line

    for group in spec.groups:
        lines += ["", f"{group.title}:", *(flag_line(flag) for flag in group.flags)]
    if spec.notes:
        lines += ["", *spec.notes]
    return "\n".join(lines) + "\n"
