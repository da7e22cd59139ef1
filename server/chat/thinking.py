"""What the templates of each generation are told about thinking.

Everybody names effort in OpenAI's words, but each template knows other ones, and takes those it does not know for its
highest: `low`, passed to GLM-5.2 as it is, would mean the most.
"""

from __future__ import annotations

from typing import Any

from server.chat.glm_generation import Generation
from server.chat.options import EFFORTS, Thinking
from server.errors import InvalidRequest

_OFF = ("none", "minimal")
_FROM_HIGH = {"medium": "high", "high": "high", "xhigh": "max", "max": "max"}
_BY_GENERATION = {
    Generation.GLM_5_2: _FROM_HIGH | {"low": "high"},
    # It cannot stop thinking, so the least there is stands for none.
    Generation.GLM_5_3: _FROM_HIGH | {"none": "low", "minimal": "low", "low": "low"},
}


def thinking_variables(thinking: Thinking, generation: Generation | None) -> dict[str, Any]:
    """Template variables. `generation` None: no GLM, so effort is passed as it is. Raises InvalidRequest for an effort
    that GLM has no meaning for."""
    variables = _of_effort(thinking.effort, generation) if thinking.effort else {}
    if thinking.enabled is not None:
        variables["enable_thinking"] = thinking.enabled
    if thinking.clear is not None:
        variables["clear_thinking"] = thinking.clear
    return variables


def _of_effort(effort: str, generation: Generation | None) -> dict[str, Any]:
    if generation is None:
        return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    if effort not in EFFORTS:
        raise InvalidRequest(
            f"Field 'reasoning_effort': must be one of {', '.join(EFFORTS)}, but got {effort[:80]!r}",
            param="reasoning_effort",
        )
    variables: dict[str, Any] = {"enable_thinking": effort not in _OFF}
    known = _BY_GENERATION.get(generation, {})
    if effort in known:
        variables["reasoning_effort"] = known[effort]
    return variables
