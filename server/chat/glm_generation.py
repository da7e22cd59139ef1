"""Which GLM generation writes and reads: it decides the chat template and one whitespace rule, nothing else."""

from __future__ import annotations

from enum import StrEnum


class Generation(StrEnum):
    """A generation stands for its sub-versions too (4.5 for 4.6, 5 for 5.1) and its Flash, Air and vision models."""

    GLM_4_5 = "4.5"
    GLM_4_7 = "4.7"
    GLM_5 = "5"
    GLM_5_2 = "5.2"
    GLM_5_3 = "5.3"

    @property
    def trims_reasoning(self) -> bool:
        """4.5 and 4.6 put line breaks around the block that are layout; later ones mean every character."""
        return self is Generation.GLM_4_5
