"""Headers of the model that a plan is for: from files here, or from the hub by reading in places."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from server.errors import ConfigError, ModelFileError
from server.fit.facts import ModelShape, Weights, read_shape
from server.gguf import Header, read_header, read_header_from
from server.planning import shard_paths
from server.store.names import HubName, is_path, parse_name
from server.store.source import demo_model, find_model_file, tiny_glm_model

if TYPE_CHECKING:
    from server.cli.settings import Settings
    from server.store.hub import Hub, Listing
    from server.store.quants import RemoteQuant


@dataclass(frozen=True, slots=True)
class Candidate:
    """One model to plan. `roughly`: only its size was read, the rest is that of another quant of the same model."""

    name: str
    header: Header  # the first
    shape: ModelShape
    roughly: bool = False


def candidates(settings: Settings, asked: str | None) -> tuple[list[Candidate], int]:
    """The model, or all quants of a repository where none was named; and the bytes that came over the line. Raises
    ConfigError, ModelFileError and FetchError."""
    asked = asked or settings["gguf"] or settings["hf-repo"]
    if settings["demo"]:
        return [_local(demo_model() if settings["demo"] == "small" else tiny_glm_model())], 0
    if not asked:
        raise ConfigError("no model is given: python -m server plan MODEL, where MODEL is a path or OWNER/REPO[:QUANT]")
    if is_path(asked):
        return [_local(find_model_file(asked))], 0
    name = parse_name(asked)
    if isinstance(name, Path):
        return [_local(name)], 0
    from server.store.hub import Hub

    hub = Hub.from_environment(os.environ, token=settings["hf-token"], offline=settings["offline"])
    return _remote(hub, name)


def _local(path: Path) -> Candidate:
    headers = [read_header(each) for each in shard_paths(str(path))]
    return Candidate(path.name, headers[0], read_shape(headers))


def _remote(hub: Hub, name: HubName) -> tuple[list[Candidate], int]:
    from server.store.quants import choose, quants_of

    listing = hub.list_files(name)
    quants = quants_of(listing.files)
    if name.quant or name.file or len(quants) == 1:
        chosen = choose(name, listing.files)
        headers, n_read = _headers(hub, listing, chosen)
        return [Candidate(f"{name.repo}:{chosen.name}", headers[0], read_shape(headers))], n_read
    if not quants:
        choose(name, listing.files)  # says what is the matter
    whole = [quant for quant in quants if not quant.n_missing]
    if not whole:
        raise ModelFileError(f"{name.repo} has no quant whose shards are all there")
    # the middle one stands for all: headers of a large vocabulary are 12 MiB each
    base = whole[len(whole) // 2]
    headers, n_read = _headers(hub, listing, base)
    shape = read_shape(headers)
    return [
        Candidate(
            quant.name,
            headers[0],
            shape if quant is base else _resized(shape, quant.n_bytes, base.n_bytes),
            roughly=quant is not base,
        )
        for quant in whole
    ], n_read


def _headers(hub: Hub, listing: Listing, quant: RemoteQuant) -> tuple[list[Header], int]:
    from server.store.remote import RemoteReader

    headers, n_read = [], 0
    for file in quant.files:
        with RemoteReader(hub.source(listing, file)) as reader:
            headers.append(read_header_from(reader, file.name))
            n_read += reader.n_read
    return headers, n_read


def _resized(shape: ModelShape, n_bytes: int, base: int) -> ModelShape:
    """The same model with all tensors larger or smaller alike."""

    def scaled(size: int) -> int:
        return size * n_bytes // base

    blocks = tuple(
        replace(
            block,
            weights=Weights(*(scaled(getattr(block.weights, kind)) for kind in Weights.__slots__)),
            tensors={name: scaled(size) for name, size in block.tensors.items()},
        )
        for block in shape.blocks
    )
    return replace(
        shape,
        blocks=blocks,
        file_bytes=n_bytes,
        token_embd_bytes=scaled(shape.token_embd_bytes),
        output_bytes=scaled(shape.output_bytes),
        other_bytes=scaled(shape.other_bytes),
    )
