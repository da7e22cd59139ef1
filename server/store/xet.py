"""The other way to a file's bytes: huggingface_hub's own, through Xet storage (hf_xet). It gets a file as a whole and
does not go on in the middle, so it is only for files that the plain way is closed to."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.errors import FetchError
from server.store.hub import Hub, Listing, transport_error
from server.store.quants import RemoteFile


@contextmanager
def got_through_xet(hub: Hub, listing: Listing, file: RemoteFile, folder: Path) -> Iterator[Path]:
    """The file, somewhere in the folder, which is removed behind the block. Raises FetchError, and OSError for a full
    disk."""
    from huggingface_hub import hf_hub_download

    try:
        try:
            got = hf_hub_download(
                listing.repo,
                file.path,
                revision=listing.commit,
                local_dir=folder,
                endpoint=hub.endpoint,
                token=hub.token,
            )
        except (transport_error(), OSError, RuntimeError, ValueError) as error:  # hf_xet raises any of the last three
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise FetchError(
                f"{file.name} cannot be had, neither in the plain way nor through Xet storage "
                f"({' '.join(str(error).split())}); give another HF_ENDPOINT, or run the same command later"
            ) from None
        yield Path(got)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
