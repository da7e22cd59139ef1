"""Lines that clients put into system prompts, that change with every request and mean nothing to a model. They stand at
the start, so that nothing after them could be taken from the cache; they are left out.

Known is one: Claude Code (2.1.29 and later) says who is to be billed,
`x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;`, with another `cch` each time. It is
a line, or a text of its own that proxies join to the next one without a line break.
"""

from __future__ import annotations

import dataclasses
import re

from server.chat.messages import Conversation

_MARK = "x-anthropic-billing-header:"
_FIELD = r"[ \t]*[\w-]+=[^;\s]*"
_LAST = rf"{_FIELD}[ \t]*(?=\r?\n|\Z)"  # the only one that may do without a semicolon
_BILLING = re.compile(rf"^{_MARK}(?:(?:{_FIELD};)+(?:{_LAST})?|{_LAST})[ \t]*\r?\n?", re.MULTILINE)
_ROLES = ("system", "developer")


def without_volatile_lines(conversation: Conversation) -> Conversation:
    """The same object where there is nothing to leave out. A system message of which nothing remains is left out whole,
    unless it is all there is."""
    if not any(message.role in _ROLES and _MARK in (message.content or "") for message in conversation.messages):
        return conversation
    messages = []
    for message in conversation.messages:
        content = message.content
        if message.role in _ROLES and content is not None and _MARK in content:
            content = _BILLING.sub("", content)
            if not content and len(conversation.messages) > 1:
                continue
            message = dataclasses.replace(message, content=content)
        messages.append(message)
    stable = dataclasses.replace(conversation, messages=tuple(messages))
    return conversation if stable == conversation else stable
