"""The fields by which a request says what its answer has to look like: OpenAI's, llama.cpp's and vLLM's ways."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from server.api.schemas.fields import Body, refuse, shown
from server.chat.forms import AnswerForm, ChoiceForm, JsonForm, LarkForm, RegexForm

MOST_CHOICES = 10_000
LARK_MARK = "%llguidance"  # llama.cpp's sign of it, too

_OBJECT: dict[str, Any] = {"type": "object"}


def _schema(value: Any) -> Any:
    """A JSON schema, or one written as a text, as vLLM's clients do."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"must be a JSON schema, but is not JSON: {error}") from error
    if value is not None and not isinstance(value, dict | bool):
        raise ValueError(f"must be a JSON schema, which is an object, but got {shown(value)}")
    return value


def _choices(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise ValueError(f"must be a list of at least one text, none empty, but got {shown(value)}")
    if len(value) > MOST_CHOICES:
        raise ValueError(f"must be at most {MOST_CHOICES} texts, but got {len(value)}")
    return tuple(value)


Schema = Annotated[
    dict[str, Any] | bool,
    BeforeValidator(_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "boolean"}, {"type": "null"}]}),
]
Choices = Annotated[
    tuple[str, ...],
    BeforeValidator(_choices),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}, "minItems": 1}, {"type": "null"}]}),
]


class StructuredOutputs(Body):
    """vLLM's. How blanks may stand in JSON is not for the client to say here."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: Any = None


class JsonSchemaFormat(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="True: a schema that cannot be enforced whole is refused.")


class ResponseFormat(Body):
    """`schema` beside `type` is llama.cpp's."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if self.type not in ("text", "json_object", "json_schema"):
            raise ValueError(f"type must be text, json_object or json_schema, but got {shown(self.type)}")
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ValueError("type json_schema needs 'json_schema' with a 'schema' in it")
        return self

    def form(self) -> AnswerForm | None:
        if self.type == "text":
            return None
        if self.type == "json_schema" and self.json_schema is not None:
            wanted = self.json_schema
            return JsonForm(wanted.schema_, "response_format.json_schema", strict=bool(wanted.strict))
        return JsonForm(self.schema_ or _OBJECT, "response_format", strict=False)


class FormFields(Body):
    """At most one of these fields may ask for something."""

    grammar: str | None = Field(
        None, description="GBNF that the answer must follow; Lark for llguidance, if it begins with %llguidance."
    )
    json_schema: Schema | None = Field(None, description="JSON schema that the answer must follow.")
    response_format: ResponseFormat | None = Field(None, description="OpenAI's way to ask for JSON.")
    regex: str | None = Field(None, description="Regular expression that the answer must match as a whole.")
    choice: Choices | None = Field(None, description="The answer must be one of these texts.")
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's way to ask for any of them.")
    guided_json: Schema | None = Field(None, description="vLLM's older name of json_schema.")
    guided_regex: str | None = Field(None, description="vLLM's older name of regex.")
    guided_choice: Choices | None = Field(None, description="vLLM's older name of choice.")
    guided_grammar: str | None = Field(None, description="vLLM's older name of grammar.")

    @cached_property
    def _asked(self) -> tuple[str, AnswerForm | str] | None:
        """The field that asks for a form, and the form; a text is GBNF."""
        asked = [(name, form) for name, form in self._forms() if form is not None]
        if len(asked) > 1:
            first, second = asked[0][0], asked[1][0]
            raise refuse(second, f"is not supported together with '{first}'; leave one of them out")
        return asked[0] if asked else None

    @property
    def answer_form(self) -> AnswerForm | None:
        """What the answer has to look like, unless that is said in GBNF. Raises InvalidRequest for two forms."""
        return None if self._asked is None or isinstance(self._asked[1], str) else self._asked[1]

    @property
    def gbnf(self) -> str | None:
        return self._asked[1] if self._asked is not None and isinstance(self._asked[1], str) else None

    def _forms(self) -> list[tuple[str, AnswerForm | str | None]]:
        other = self.structured_outputs or StructuredOutputs()
        if other.structural_tag is not None:
            raise refuse("structured_outputs.structural_tag", "is not supported; send the tools as 'tools'")
        return [
            ("grammar", _grammar(self.grammar, "grammar")),
            ("json_schema", _json(self.json_schema, "json_schema")),
            ("response_format", None if self.response_format is None else self.response_format.form()),
            ("regex", _regex(self.regex, "regex")),
            ("choice", _choice(self.choice, "choice")),
            ("structured_outputs.json", _json(other.json_, "structured_outputs.json")),
            ("structured_outputs.json_object", _json(_OBJECT, "structured_outputs") if other.json_object else None),
            ("structured_outputs.regex", _regex(other.regex, "structured_outputs.regex")),
            ("structured_outputs.choice", _choice(other.choice, "structured_outputs.choice")),
            ("structured_outputs.grammar", _grammar(other.grammar, "structured_outputs.grammar")),
            ("guided_json", _json(self.guided_json, "guided_json")),
            ("guided_regex", _regex(self.guided_regex, "guided_regex")),
            ("guided_choice", _choice(self.guided_choice, "guided_choice")),
            ("guided_grammar", _grammar(self.guided_grammar, "guided_grammar")),
        ]


def _json(schema: Mapping[str, Any] | bool | None, field: str) -> AnswerForm | None:
    """A schema of nothing but {} asks for any JSON; false would allow no answer at all."""
    return None if schema is None or schema is False else JsonForm(schema, field)


def _regex(pattern: str | None, field: str) -> AnswerForm | None:
    return RegexForm(pattern, field) if pattern else None


def _choice(choices: tuple[str, ...] | None, field: str) -> AnswerForm | None:
    return None if choices is None else ChoiceForm(choices, field)


def _grammar(text: str | None, field: str) -> AnswerForm | str | None:
    if not text:
        return None
    return LarkForm(text, field) if text.lstrip().startswith(LARK_MARK) else text
