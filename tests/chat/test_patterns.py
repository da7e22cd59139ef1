"""Translated patterns, matched by llguidance as the engine would."""

from __future__ import annotations

import jsonschema_rs
import pytest

from server.chat.lark import Lark, regex
from server.chat.patterns import FORMAT_PATTERNS, whole_match
from server.engine.constraint import ConstraintCompiler
from server.engine.messages import Constraint
from server.errors import InvalidRequest
from tests.support.grammar_walk import Walker
from tests.support.token_tables import glm_table


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    table = glm_table()
    return ConstraintCompiler(lambda: table)


def of_pattern(pattern: str) -> Constraint:
    lark = Lark(lenient=False)
    lark.rule("start", lark.terminal(regex(pattern)))
    return Constraint(lark.text())


def matches(compiler: ConstraintCompiler, pattern: str, text: str) -> bool:
    parser = compiler.prepare(of_pattern(pattern)).parser.deep_copy()
    data = list(text.encode())
    return parser.try_consume_tokens(data) == len(data) and parser.is_accepting()


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("^a$", "a"),
        ("b", "abc"),
        ("^a|c$", "abx"),
        ("^a|c$", "xbc"),
        ("^(a|b)$", "b"),
        ("^(?:a|b)+$", "abab"),
        (r"^\d+\.\d$", "12.5"),
        (r"^[\w-]+$", "a_b-9"),
        (r"^\W$", "é"),
        (r"^[^\s/]+/x$", "a/x"),
        (r"^\/a\/$", "/a/"),
        (r"^\u00e9\x41$", "éA"),
        (r"^[\u4e00-\u9fa5]{2}$", "数量"),
        (r"^\$\^\|$", "$^|"),
        (r"^[$^|]$", "|"),
        (r"^[[\]]$", "["),
        (r"^[]a]?$|^a\$$", "a$"),
        (r"^[^]$", "\n"),
        (r"^[a&&b]+$", "a&b"),
        (r"^.$", "x"),
        (r"\\$", "a\\"),
        ("", "anything\n"),
    ],
)
def test_matches(compiler: ConstraintCompiler, pattern: str, text: str) -> None:
    assert matches(compiler, whole_match(pattern), text)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("^a$", "ab"),
        ("^a|c$", "xbx"),
        (r"^\d$", "٣"),  # an Arabic digit
        (r"^\w$", "é"),
        (r"^.$", "\n"),
        (r"^.$", "\u2028"),
        (r"a\$", "a"),
        ("[]", "a"),
    ],
)
def test_does_not_match(compiler: ConstraintCompiler, pattern: str, text: str) -> None:
    assert not matches(compiler, whole_match(pattern), text)


@pytest.mark.parametrize("pattern", ["(?=a)b", "(?<!a)b", r"(a)\1", r"\bword", "a(^b)", "(", "a{2,1}"])
def test_what_rust_cannot_do_is_refused(compiler: ConstraintCompiler, pattern: str) -> None:
    with pytest.raises(InvalidRequest):
        compiler.prepare(of_pattern(whole_match(pattern)))


@pytest.mark.parametrize("name", sorted(FORMAT_PATTERNS))
def test_formats(name: str) -> None:
    walker = Walker(glm_table())
    validator = jsonschema_rs.validator_for({"type": "string", "format": name}, validate_formats=True)
    for seed in range(25):
        text = walker.walk(of_pattern(FORMAT_PATTERNS[name]), seed)
        assert validator.is_valid(text), text
