"""Writes the tables of docs/flags.md from the flag table: `python -m server.cli.reference docs/flags.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from server.cli.commands import COMMANDS
from server.cli.flag import Flag
from server.cli.flags import GROUPS
from server.cli.help import toml
from server.cli.removed import FOREIGN, SPELLINGS, Answer, Foreign, Spelling
from server.cli.special_values import SamplerLetters
from server.cli.subcommand import Spec, usage

BEGIN = "<!-- tables: written by python -m server.cli.reference, do not edit -->"
END = "<!-- end of tables -->"


def tables() -> str:
    lines: list[str] = []
    for group in GROUPS:
        lines += [f"### {group.title}", "", "| flag | variable | default | meaning |", "|---|---|---|---|"]
        lines += [_row(flag) for flag in group.flags]
        lines.append("")
    for command in COMMANDS:
        lines += _command_tables(command.module().SPEC)
    lines += ["### Other spellings", "", "| name | same as |", "|---|---|"]
    for spelling in SPELLINGS:
        names = _code([*spelling.names, *spelling.off])
        setting = f"--{spelling.sets}" + _converted(spelling)
        lines.append(f"| {names} | {setting} |")
    for answer, title in (
        (Answer.SAME, "Names that ask for what the server does anyway"),
        (Answer.IGNORED, "Names that are accepted with a warning and have no effect"),
        (Answer.REFUSED, "Names that are refused"),
    ):
        lines += ["", f"### {title}", "", "| name | why |", "|---|---|"]
        by_reason: dict[str, list[str]] = {}
        for foreign in FOREIGN:
            answered = _foreign_names(foreign) if foreign.answer is answer else []
            if foreign.off_answer is answer:
                answered += [f"`{name}`" for name in foreign.off]
            if answered:
                by_reason.setdefault(foreign.why, []).extend(answered)
        lines += [f"| {', '.join(each)} | {why} |" for why, each in by_reason.items()]
    return "\n".join(lines) + "\n"


def _command_tables(spec: Spec, command: str = "python -m server") -> list[str]:
    lines = [f"### `{usage(spec, command)}`", "", f"{spec.about[0].upper()}{spec.about[1:]}.", ""]
    for verb in spec.verbs:
        lines += _command_tables(verb, f"{command} {spec.name}")
    if spec.places or spec.flags:
        lines += ["| argument | variable | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{place.name}` | | | {_cell(place.help)} |" for place in spec.places]
        lines += [*map(_row, spec.flags), ""]
    return lines


def _converted(spelling: Spelling) -> str:
    if spelling.text is not None:
        return f" {spelling.text}"
    return ", one letter for each sampler" if isinstance(spelling.convert, SamplerLetters) else ""


def _row(flag: Flag) -> str:
    names = _code([*flag.names, *flag.off])
    value = f" {_cell(flag.kind.metavar)}" if flag.kind.metavar else ""
    variable = "" if not flag.env or (flag.action and flag.key != "config") else f"`{flag.env}`"
    meaning = f"{flag.help}. {flag.note}" if flag.note else flag.help
    return f"| {names}{value} | {variable} | {_default(flag)} | {_cell(meaning)} |"


def _default(flag: Flag) -> str:
    if flag.action:
        return ""
    if flag.default is None:
        plain = flag.kind.plain(None) if hasattr(flag.kind, "words") else None
        return f"`{plain}`" if plain else ""
    return f"`{_cell(toml(flag.kind.plain(flag.default)))}`"


def _foreign_names(foreign: Foreign) -> list[str]:
    names = [f"`{name}`" for name in foreign.names]
    if foreign.same_values:
        names[-1] += f" (accepted: {', '.join(foreign.same_values)})"
    return names


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def with_tables(page: str) -> str:
    """The page with the text between its marks replaced. Raises ValueError when a mark is missing."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page lacks the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    page_path = Path(sys.argv[1])
    page_path.write_text(with_tables(page_path.read_text(encoding="utf-8")), encoding="utf-8")
