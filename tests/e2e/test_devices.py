"""Several devices on a machine that has none: ggml's RPC servers on loopback."""

from __future__ import annotations

import pytest

from tests.support.rpc_servers import rpc_servers
from tests.support.server_process import run_to_end

pytestmark = pytest.mark.e2e


def test_devices_of_rpc_servers_are_listed() -> None:
    with rpc_servers(2) as endpoints:
        code, output = run_to_end(["--list-devices", "--rpc", ",".join(endpoints)])
    assert code == 0, output
    names = [line.partition(":")[0] for line in output.splitlines()]
    assert {"CPU", "RPC0", "RPC1"} <= set(names)
