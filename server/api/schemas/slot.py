"""Body of the actions on a slot."""

from __future__ import annotations

from pydantic import Field

from server.api.schemas.fields import Body


class SlotFile(Body):
    """For save and restore; erase takes no body."""

    filename: str = Field(description="A name in the folder of --slot-save-path, not a path.")
