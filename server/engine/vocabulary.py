"""The vocabulary of a loaded model: text to tokens and back. Constant data; any thread may call any method."""

from __future__ import annotations

import ctypes
import re
from types import ModuleType

from llguidance import LLTokenizer

from server.engine.constraint import TokenTable
from server.engine.messages import Span
from server.errors import InvalidRequest

_ATTR_UNKNOWN, _ATTR_CONTROL, _ATTR_USER_DEFINED = 1 << 0, 1 << 3, 1 << 4  # enum llama_token_attr
_PIECE_BYTES = 64  # longer pieces are asked for twice
# GLM ends a turn by opening the next role; llama.cpp knows that of <|endoftext|> only
_GLM_END_TEXTS = frozenset({"<|user|>", "<|observation|>", "<|endoftext|>"})


class Vocabulary:
    def __init__(self, bindings: ModuleType, handle: int, architecture: str) -> None:
        self._bindings = bindings
        self.handle = handle
        self.architecture = architecture
        self.n_tokens = int(bindings.llama_vocab_n_tokens(handle))
        self._hidden: list[bytes | None] = [None] * self.n_tokens  # pieces, control tokens empty
        self._shown: list[bytes | None] = [None] * self.n_tokens  # pieces, control tokens as text
        glm = architecture.startswith(("glm", "chatglm")) or self._has_glm_mask()
        control, self.end_tokens = self._scan(glm=glm)
        # GLM's think and call tags are user-defined tokens. llama.cpp makes them out of any text, asked to or not.
        self._tag_texts = [self.text(token) for token in self._user_defined()] if glm else []
        self._tag_pattern = _any_of(self._tag_texts)
        self.control_texts = [self.text(token) for token in control] + self._tag_texts
        self._control_pattern = _any_of(self.control_texts)
        self._longest_control = max(map(len, self.control_texts), default=0)

    def _scan(self, *, glm: bool) -> tuple[list[int], frozenset[int]]:
        vocab, get_attr, is_eog = self.handle, self._bindings.llama_vocab_get_attr, self._bindings.llama_vocab_is_eog
        control = [i for i in range(self.n_tokens) if get_attr(vocab, i) & (_ATTR_CONTROL | _ATTR_UNKNOWN)]
        ends = {i for i in range(self.n_tokens) if is_eog(vocab, i)}
        if glm:
            ends |= {token for token in control if self.text(token) in _GLM_END_TEXTS}
        return control, frozenset(ends)

    def _has_glm_mask(self) -> bool:
        """Architectures do not tell all (GLM-4.7-Flash is a deepseek2), but every GLM vocabulary has this token."""
        return len(self._tokenize("[gMASK]", add_special=False, special=True)) == 1

    def _user_defined(self) -> list[int]:
        get_attr = self._bindings.llama_vocab_get_attr
        return [
            i
            for i in range(self.n_tokens)
            if get_attr(self.handle, i) & _ATTR_USER_DEFINED and not self.text(i).isspace()
        ]

    def text(self, token: int) -> str:
        """The token's name in the vocabulary; "" for "no such token" (-1)."""
        if token < 0:
            return ""
        text: bytes | None = self._bindings.llama_vocab_get_text(self.handle, token)
        return (text or b"").decode("utf-8", errors="replace")

    @property
    def bos_text(self) -> str:
        return self.text(self._bindings.llama_vocab_bos(self.handle))

    @property
    def eos_text(self) -> str:
        return self.text(self._bindings.llama_vocab_eos(self.handle))

    @property
    def adds_bos(self) -> bool:
        return bool(self._bindings.llama_vocab_get_add_bos(self.handle))

    def is_end(self, token: int) -> bool:
        return token in self.end_tokens

    def suppressed(self) -> list[int]:
        """Tokens that the model file forbids to generate (tokenizer.ggml.suppress_tokens)."""
        count = ctypes.c_int32()
        tokens = self._bindings.llama_vocab_get_suppress_tokens(self.handle, ctypes.byref(count))
        return [tokens[i] for i in range(count.value)]

    def require(self, tokens: list[int]) -> None:
        """Raises InvalidRequest when a token is not of this vocabulary: llama.cpp would fail the whole batch."""
        if tokens and (min(tokens) < 0 or max(tokens) >= self.n_tokens):
            wrong = next(token for token in tokens if not 0 <= token < self.n_tokens)
            raise InvalidRequest(f"the token {wrong} does not exist; this model has tokens 0 to {self.n_tokens - 1}")

    def token_table(self) -> TokenTable:
        """What constraints need to know. Reads every piece: a quarter of a second for 150,000 tokens."""
        get_attr = self._bindings.llama_vocab_get_attr
        pieces = [self.piece(i, show_special=True) for i in range(self.n_tokens)]
        special = {
            i
            for i, piece in enumerate(pieces)
            if (attributes := get_attr(self.handle, i)) & (_ATTR_CONTROL | _ATTR_UNKNOWN)
            or (attributes & _ATTR_USER_DEFINED and piece.startswith(b"<") and piece.endswith(b">"))
        }
        return TokenTable(pieces, frozenset(special), self.end_tokens, self._guidance_tokenizer)

    def _guidance_tokenizer(self, table: TokenTable) -> LLTokenizer:
        """It tokenises with llama.cpp, so that text which a constraint forces is cut as the model was taught."""
        tokenize = ctypes.cast(self._bindings._lib.llama_tokenize, ctypes.c_void_p).value
        pieces = [b"\xff" + piece if i in table.special else piece for i, piece in enumerate(table.pieces)]
        return LLTokenizer.from_llamacpp(  # type: ignore[attr-defined, no-any-return]
            tokens=pieces,
            vocab_ptr=self.handle,
            tokenize_fptr=tokenize,
            eos_token=sorted(table.end_tokens),
            slices=None,
        )

    # ── text to tokens ───────────────────────────────────────────────────────────────────────────────────────────────

    def tokenize(self, spans: list[Span], *, add_special: bool) -> list[int]:
        """One prompt from its spans. Where no literal span holds the text of a control token, the spans are joined
        first, so that tokens may reach over their borders: the same result as from one string."""
        text = "".join(span.text for span in spans)
        if not self._literal_control(spans, text):
            return self._tokenize(text, add_special=add_special, special=True)
        tokens: list[int] = []
        if add_special and self.adds_bos:
            tokens.append(self._bindings.llama_vocab_bos(self.handle))
        for span in spans:
            if span.special:
                tokens += self._tokenize(span.text, add_special=False, special=True)
                continue
            for part in self._broken_tags(span.text):
                tokens += self._tokenize(part, add_special=False, special=False)
        if add_special and self._bindings.llama_vocab_get_add_eos(self.handle):
            tokens.append(self._bindings.llama_vocab_eos(self.handle))
        return tokens

    def _broken_tags(self, text: str) -> list[str]:
        """The text cut after the first character of every tag in it, so that no part holds a whole one."""
        if self._tag_pattern is None:
            return [text]
        cuts = sorted({match.start() + 1 for match in self._tag_pattern.finditer(text)})
        return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def _literal_control(self, spans: list[Span], text: str) -> bool:
        """Would the joined text make a control token out of characters of a span that is not special?"""
        start = 0
        for span in spans:
            end = start + len(span.text)
            if not span.special and self._control_pattern is not None:
                reach = self._longest_control - 1
                window = self._control_pattern.finditer(text, max(0, start - reach), end + reach)
                if any(match.start() < end and match.end(1) > start for match in window):
                    return True
            start = end
        return False

    def _tokenize(self, text: str, *, add_special: bool, special: bool) -> list[int]:
        data = text.encode("utf-8", errors="replace")
        capacity = len(data) + 2  # never more tokens than bytes, beside BOS and EOS
        for _ in range(2):
            buffer = (ctypes.c_int32 * capacity)()
            n = self._bindings.llama_tokenize(self.handle, data, len(data), buffer, capacity, add_special, special)
            if n >= 0:
                return buffer[:n]
            capacity = -n
        raise InvalidRequest(f"the text of {len(text)} characters is too long to tokenise")

    # ── tokens to text ───────────────────────────────────────────────────────────────────────────────────────────────

    def piece(self, token: int, *, show_special: bool) -> bytes:
        """Raises InvalidRequest for a token outside the vocabulary."""
        if not 0 <= token < self.n_tokens:
            self.require([token])
        cache = self._shown if show_special else self._hidden
        piece = cache[token]
        if piece is None:  # two threads may both fill it, with the same bytes
            piece = cache[token] = self._read_piece(token, show_special)
        return piece

    def _read_piece(self, token: int, special: bool) -> bytes:
        capacity = _PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            n: int = self._bindings.llama_token_to_piece(self.handle, token, buffer, capacity, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            capacity = -n

    def detokenize(self, tokens: list[int], *, show_special: bool) -> str:
        data = b"".join([self.piece(token, show_special=show_special) for token in tokens])
        return data.decode("utf-8", errors="replace")


def _any_of(texts: list[str]) -> re.Pattern[str] | None:
    """Matches, with length zero and group 1, wherever one of `texts` begins; also where two overlap."""
    alternatives = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile(f"(?=({'|'.join(map(re.escape, alternatives))}))") if alternatives else None
