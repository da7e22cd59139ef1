"""Rules for every test: no network, no settings of whoever runs them, the same examples every time."""

from __future__ import annotations

import ipaddress
import os
import sys

from hypothesis import HealthCheck, settings

_SETTINGS_OF_A_SERVER = ("LLAMA_", "GLMSERVE_", "HF_", "MODEL_ENDPOINT")


def pytest_configure() -> None:
    for name in [name for name in os.environ if name.startswith(_SETTINGS_OF_A_SERVER)]:
        del os.environ[name]
    sys.addaudithook(_forbid_the_network)
    settings.register_profile(
        "glmserve", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
    )
    settings.load_profile("glmserve")


def _forbid_the_network(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook: connecting to anything but this machine is an error."""
    if event != "socket.connect":
        return
    address = arguments[1]
    if not isinstance(address, tuple) or address[0] in {"localhost", ""}:
        return  # a unix socket, or this machine by name
    if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise RuntimeError(f"a test tried to connect to {address[0]}; tests may talk to this machine only")
