"""Digests of a model's files, which tell whether a folder still holds the same model without reading it all."""

from __future__ import annotations

import hashlib
from pathlib import Path

from forge_rl.models.hf_folder import model_files

_READ_WHOLE = 16 << 20
"""Files up to this many bytes are read whole."""
_BLOCKS, _BLOCK_BYTES = 1024, 4096
"""Evenly spaced blocks read from a larger file: any training changes nearly all of them."""


def file_digest(path: Path) -> str:
    """Return a digest of a file's content; for a large file, of its size, its beginning and evenly spaced blocks."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_READ_WHOLE))
        if size > _READ_WHOLE:
            digest.update(str(size).encode())
            for block in range(1, _BLOCKS + 1):
                file.seek((size - _BLOCK_BYTES) * block // _BLOCKS)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]


def model_digests(folder: Path) -> dict[str, str]:
    """Return a digest of each file of a model's folder that is used: weights, config, tokenizer and chat template.

    Raises:
        OSError: a file cannot be read.
    """
    return {path.name: file_digest(path) for path in model_files(folder)}
