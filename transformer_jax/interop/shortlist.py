"""Reads Marian's lexical shortlists: which target ids are likely for a source id."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from transformer_jax.errors import UserError
from transformer_jax.interop.imported import read_file
from transformer_jax.text.tokenizer import Tokenizers

_MAGIC = 0xF11A48D5013417F5
_HEADER = struct.Struct("<6Q")  # magic, checksum, first, best, numbers of offsets and of ids


class Shortlist:
    """The target ids among which each source is translated: the commonest, and those that are
    likely for its own ids.

    path: a `.bin` of Marian, with the ids of its vocabularies. `digests` is its SHA-256 by
    its name. UserError: it is none, cut or damaged, or of other vocabularies than the run's.
    """

    def __init__(self, path: str | Path, tokenizers: Tokenizers) -> None:
        source, target = (np.asarray(side.model_ids) for side in tokenizers)
        self.digests: dict[str, str] = {}
        first, offsets, ids = _read(path, read_file(Path(path), self.digests))
        size = len(offsets) - 1
        if size != source.max() + 1 or max(ids.max(initial=0), first - 1) > target.max():
            theirs = f"lists of {size:,} source ids with target ids up to {ids.max(initial=0):,}"
            own = f"{source.max() + 1:,} and {target.max() + 1:,} ids"
            raise UserError(f"{path}: is of other vocabularies: it has {theirs}; the run has {own}")
        ours = tokenizers.target.our_ids
        lists = np.split(ours[ids], offsets[1:-1])
        none = np.zeros(0, np.int32)
        self._lists = [lists[i] if i >= 0 else none for i in source]
        special = np.flatnonzero(target < 0)
        self._common = np.union1d(special, ours[:first]).astype(np.int32)

    def __call__(self, source: Sequence[int]) -> Int32[np.ndarray, " C"]:
        """Returns the target ids of a source, ascending."""
        lists = [self._lists[i] for i in {*source}]
        return np.union1d(self._common, np.concatenate(lists)).astype(np.int32)


def _read(path: str | Path, data: bytes) -> tuple[int, np.ndarray, np.ndarray]:
    """Returns the number of commonest ids, where each source id's list begins, and all lists."""
    if len(data) < _HEADER.size or _HEADER.unpack_from(data)[0] != _MAGIC:
        raise UserError(f"{path}: is no shortlist of Marian (lex.*.bin)")
    _, checksum, first, _, offset_count, id_count = _HEADER.unpack_from(data)
    if len(data) != _HEADER.size + 8 * offset_count + 4 * id_count:
        fault = f"which {len(data):,} bytes do not hold; it is cut or damaged"
        raise UserError(f"{path}: claims {offset_count:,} offsets and {id_count:,} ids, {fault}")
    offsets = np.frombuffer(data, "<u8", offset_count, _HEADER.size).astype(np.int64)
    ids = np.frombuffer(data, "<u4", id_count, _HEADER.size + offsets.nbytes)
    in_order = offset_count > 1 and offsets[0] == 0 and offsets[-1] == id_count
    if not in_order or (np.diff(offsets) < 0).any() or _checksum(data[16:]) != checksum:
        raise UserError(f"{path}: is damaged: its checksum or its offsets are wrong")
    return first, offsets, ids


def _checksum(data: bytes) -> int:
    """Returns Marian's hash of the words of 64 bits."""
    seed = 0
    for word in np.frombuffer(data, "<u8", len(data) // 8).tolist():
        seed ^= (word + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & (1 << 64) - 1
    return seed
