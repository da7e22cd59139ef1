from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.chat.dialects import choose_dialect
from server.chat.messages import ContentDelta, EndOfText, ParsedTurn, Prompt, fold
from server.chat.plain import PlainDialect


@given(st.lists(st.text()), st.sampled_from(EndOfText))
def test_all_text_is_content(chunks: list[str], end: EndOfText) -> None:
    parser = PlainDialect().parser(Prompt(()), ())
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)] + parser.finish(end)
    assert fold(deltas) == ParsedTurn(content="".join(chunks))
    assert all(isinstance(delta, ContentDelta) and delta.text for delta in deltas)


def test_what_is_no_glm_is_plain() -> None:
    dialect = choose_dialect(None)
    assert (dialect.name, dialect.shows_special_tokens) == ("plain", False)
