from __future__ import annotations

from typing import Any

import pytest

from server.chat.glm_generation import Generation
from server.chat.options import EFFORTS, Thinking
from server.chat.thinking import thinking_variables
from server.errors import InvalidRequest

OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (Generation.GLM_4_5, [OFF, OFF, ON, ON, ON, ON, ON]),
        (Generation.GLM_4_7, [OFF, OFF, ON, ON, ON, ON, ON]),
        (Generation.GLM_5, [OFF, OFF, ON, ON, ON, ON, ON]),
        (
            Generation.GLM_5_2,
            [OFF, OFF, *(ON | {"reasoning_effort": effort} for effort in ("high", "high", "high", "max", "max"))],
        ),
        (
            Generation.GLM_5_3,
            [
                *(OFF | {"reasoning_effort": "low"} for _ in range(2)),
                *(ON | {"reasoning_effort": effort} for effort in ("low", "high", "high", "max", "max")),
            ],
        ),
    ],
)
def test_efforts_mean_what_the_template_of_the_generation_knows(
    generation: Generation, expected: list[dict[str, Any]]
) -> None:
    assert [thinking_variables(Thinking(effort=effort), generation) for effort in EFFORTS] == expected


def test_other_models_get_the_word_itself() -> None:
    assert thinking_variables(Thinking(effort="ultra"), None) == {"reasoning_effort": "ultra"}
    assert thinking_variables(Thinking(effort="none"), None) == OFF


def test_an_effort_that_glm_does_not_have() -> None:
    with pytest.raises(InvalidRequest, match="none, minimal, low, medium, high, xhigh, max, but got 'ultra'"):
        thinking_variables(Thinking(effort="ultra"), Generation.GLM_5_2)


def test_the_switch_is_stronger_than_the_effort() -> None:
    thinking = Thinking(enabled=False, effort="high", clear=False)
    assert thinking_variables(thinking, Generation.GLM_4_7) == {"enable_thinking": False, "clear_thinking": False}
    assert thinking_variables(Thinking(), Generation.GLM_5_2) == {}
