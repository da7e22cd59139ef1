"""Kinds of values: what they accept, what their rule says, and that what is printed can be read back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.cli.flags import all_flags
from server.cli.special_values import (
    Biases,
    Endpoints,
    Hosts,
    JsonObject,
    Level,
    Origins,
    Overrides,
    Prefix,
    Proportions,
    SamplerLetters,
    Samplers,
)
from server.cli.values import BadValue, Choice, Kind, Number, Switch, Texts, Whole, Words, split_csv

INF = float("inf")

GOOD: list[tuple[Kind, str, Any]] = [
    (Kind(), "a b", "a b"),
    *((Switch(), text, True) for text in ("on", "TRUE", "1", "enabled", "yes")),
    *((Switch(), text, False) for text in ("off", "False", "0", "disabled", "no")),
    (Whole(least=-1), "-1", -1),
    (Whole(), "+7", 7),
    (Whole(words={"auto": None}), "AUTO", None),
    (Whole(words={"all": -1, "-2": -1}), "-2", -1),
    (Number(), "-1.5e3", -1500.0),
    (Number(least=0, most=1), "1", 1.0),
    (Choice(choices=("on", "off"), same={"1": "on"}), "1", "on"),
    (Choice(choices=("layer",)), " Layer ", "layer"),
    (Words(), "a, b,,a", ("a", "b")),
    (Words(), '"a,b","say ""hi"""', ("a,b", 'say "hi"')),
    (Texts(none="none"), "a,b", ("a,b",)),
    (Texts(none="none"), "none", ()),
    (Proportions(), "3,1", (3.0, 1.0)),
    (Proportions(), "3/1/0", (3.0, 1.0, 0.0)),
    (Overrides(), r"blk\.\d+=CPU,x=CUDA0", ((r"blk\.\d+", "CPU"), ("x", "CUDA0"))),
    (Endpoints(), "10.0.0.2:50052, host:1,[::1]:2", ("10.0.0.2:50052", "host:1", "[::1]:2")),
    (Biases(), "15043+1", ((15043, 1.0),)),
    (Biases(), " 5 - 0.5", ((5, -0.5),)),
    (Biases(), "5-inf", ((5, -INF),)),
    (Samplers(), "top-k;temp;typical", ("top_k", "temperature", "typ_p")),
    (SamplerLetters(), "kt", ("top_k", "temperature")),
    (JsonObject(), '{"a": [1, null]}', {"a": [1, None]}),
    *((Level(), text, "debug") for text in ("debug", "4", "5", "trace")),
    *((Level(), text, "error") for text in ("0", "1", "Error")),
    (Level(), "warning", "warn"),
    (Prefix(), "/glm/v2/", "/glm/v2"),
    (Prefix(), "", ""),
    (Prefix(), "/", ""),
    (Hosts(), "0.0.0.0,[::1],/run/glm.sock,my-host", ("0.0.0.0", "::1", "/run/glm.sock", "my-host")),
    (Origins(), "*", ("*",)),
    (Origins(), "localhost,https://a.example:8443", ("localhost", "https://a.example:8443")),
]

BAD: list[tuple[Kind, str]] = [
    (Kind(), ""),
    (Switch(), "maybe"),
    (Switch(), ""),
    *((Whole(), text) for text in ("", "-1", "1.0", "1_000", "0x10", "ten", "1e3", "9" * 30)),
    (Whole(most=65535), "65536"),
    (Whole(words={"auto": None}), "automatic"),
    *((Number(), text) for text in ("", "nan", "inf", "-inf", "1,5", "x")),
    (Number(least=0, above=True), "0"),
    (Number(least=0, most=1), "1.01"),
    (Choice(choices=("a", "b")), "c"),
    (Words(), " , "),
    (Texts(), ""),
    *((Proportions(), text) for text in ("", "a", "-1,1", "0,0", "nan", ",".join("1" * 17))),
    *((Overrides(), text) for text in ("", "x", "=CPU", "x=", "(=CPU")),
    *((Endpoints(), text) for text in ("", "host", "host:70000", "http://host:1")),
    *((Biases(), text) for text in ("", "5", "+1", "5+", "5+x", "a+1", "5+nan")),
    *((Samplers(), text) for text in ("", "top_q", "top_k;;temp")),
    *((SamplerLetters(), text) for text in ("", "kz")),
    *((JsonObject(), text) for text in ("", "{", "[1]", "3")),
    *((Level(), text) for text in ("", "6", "loud")),
    *((Prefix(), text) for text in ("glm", "/a b", "/a//b", "http://x")),
    *((Hosts(), text) for text in ("", "http://x", "x:8080", "a b")),
    *((Origins(), text) for text in ("", "https://a.example/", "a.example")),
]


@pytest.mark.parametrize(("kind", "text", "value"), GOOD)
def test_good_texts_become_values(kind: Kind, text: str, value: Any) -> None:
    assert kind.parse(text) == value


@pytest.mark.parametrize(("kind", "text"), BAD)
def test_bad_texts_meet_the_rule(kind: Kind, text: str) -> None:
    with pytest.raises(BadValue) as caught:
        kind.parse(text)
    assert str(caught.value).startswith(kind.rule)


@pytest.mark.parametrize(("kind", "text", "value"), GOOD)
def test_what_is_shown_can_be_read_back(kind: Kind, text: str, value: Any) -> None:
    plain = kind.plain(value)
    if isinstance(plain, list):
        read = [kind.parse(each) for each in kind.join(plain)]
        assert tuple(item for part in read for item in part) == value
    else:
        assert kind.parse(str(plain)) == value


@pytest.mark.parametrize("flag", [each for each in all_flags() if each.kind.takes_value], ids=lambda flag: flag.key)
def test_samples_follow_their_rule(flag: Any) -> None:
    flag.kind.parse(flag.kind.sample.strip("'"))


@pytest.mark.parametrize("kind", [Whole(), Number(), Switch(), Kind(), JsonObject(), Choice(choices=("a",))])
def test_lists_are_refused_where_one_value_is_meant(kind: Kind) -> None:
    with pytest.raises(BadValue, match="not a list"):
        kind.join(["1", "2"])


@given(st.lists(st.text(st.characters(exclude_characters="\0"), min_size=1).filter(lambda text: text == text.strip())))
def test_lists_of_words_survive_commas_and_quotes(words: list[str]) -> None:
    unique = tuple(dict.fromkeys(words))
    if unique:
        (text,) = Words().join(list(unique))
        assert Words().parse(text) == unique


@given(st.text())
def test_csv_never_fails(text: str) -> None:
    assert split_csv(text)


@given(st.text(max_size=20))
def test_no_text_makes_a_kind_raise_anything_else(text: str) -> None:
    for kind in {type(kind): kind for kind, _, _ in GOOD}.values():
        try:
            kind.parse(text)
        except BadValue as bad:
            rule = str(bad)
        else:
            continue
        assert rule
