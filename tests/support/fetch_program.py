"""A process that fetches one file, to be killed: python -m tests.support.fetch_program URL FOLDER SIZE SHA256 COMMIT.

It claims often and asks for small pieces, so that a test with a small file is to it as a large file to the command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from server.store.fetch import Fetch, FileProgress, Plan, plan_fetch
from server.store.hub import Hub, Listing
from server.store.quants import RemoteFile, quants_of
from server.store.transfer import TransferOptions

CLAIM_BYTES = 32 << 10
PIECE_BYTES = 16 << 10
CONNECTIONS = 4


class _Silent:
    def begin(self, plan: Plan) -> None:
        pass

    def tick(self, files: Sequence[FileProgress]) -> None:
        pass

    def say(self, text: str) -> None:
        print(text, flush=True)


def main() -> None:
    endpoint, folder, size, sha256, commit = sys.argv[1:]
    file = RemoteFile("m.gguf", int(size), sha256)
    listing = Listing("a/b", commit, (file,))
    options = TransferOptions(
        connections=CONNECTIONS, piece_bytes=PIECE_BYTES, claim_every_bytes=CLAIM_BYTES, first_wait_s=0.01, give_up_s=20
    )
    plan = plan_fetch(listing, quants_of(listing.files)[0], Path(folder))
    Fetch(plan, Hub(endpoint, token="hf_right"), options, _Silent()).run()


if __name__ == "__main__":
    main()
