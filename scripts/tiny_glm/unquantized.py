"""A copy of the model with every weight in full precision, in one file, for exact comparison with PyTorch.

llama.cpp multiplies a q8_0 weight by an activation that it rounds to 8 bits too, so logits of the shipped file differ
from PyTorch's by design. With the same values written as f32 only the order of summation is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf


def write_unquantized(shards: Sequence[Path], path: Path) -> None:
    """`shards` in order; the first one holds the metadata."""
    readers = [gguf.GGUFReader(shard) for shard in shards]
    writer = gguf.GGUFWriter(path, "glm-dsa")
    for field in readers[0].fields.values():
        if field.name.startswith(("GGUF.", "split.")) or field.name in ("general.architecture", "general.file_type"):
            continue
        element_type = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], element_type)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for reader in readers:
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
