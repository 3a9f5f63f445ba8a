"""Reads the arrays and options in a model file of Marian: `.npz` or `.bin`, also Firefox's.

A `.bin` holds, in little-endian order: the version 1 and the number of arrays; for each the length
of its name, its type, its rank and the size of its data (64 bits each); the names, which end with
NUL; the dimensions (32 bits each); padding, whose size comes first; the data. Data of 8-bit
matrices is followed by the multiplier of their values.
"""

import io
import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from transformer_jax.errors import UserError, about
from transformer_jax.interop.imported import PICKLE, read_file

_OPTIONS = "special:model.yml"
_FLOAT32, _CHARACTERS, _INTGEMM8 = 0x404, 0x101, 0x4101  # types of arrays
_MOST_ARRAYS, _MOST_DIMENSIONS, _LONGEST_NAME = 1 << 16, 8, 1 << 12
_DEFLATE = 1032  # bytes that one compressed byte can hold


def read(path: Path, digests: dict[str, str]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads the options that a model was made with, and its arrays in float32. Adds the digest of
    the file. UserError: it is none, cut or damaged, or has arrays of unknown types."""
    data = read_file(path, digests)
    with about(path, ValueError, yaml.YAMLError, zipfile.BadZipFile, EOFError, struct.error):
        if data[:1] == b"\x80" or b"data.pkl" in data[:128]:
            raise UserError(PICKLE)
        arrays = _read_npz(data) if data.startswith(b"PK\3\4") else _read_bin(data)
        text = arrays.pop(_OPTIONS, None)
        if text is None:
            raise UserError(f"{_OPTIONS}: no such array, so it is no model of Marian")
        options = yaml.safe_load(text.tobytes().rstrip(b"\0").decode())
        if not isinstance(options, dict):
            raise UserError(f"{_OPTIONS}: must hold options")
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise UserError(f"{name}: has a value that is not finite; the file is damaged")
    return options, arrays


def _read_npz(data: bytes) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if member.file_size > _DEFLATE * max(member.compress_size, 1):
                raise UserError(
                    f"{name}: claims {member.file_size} bytes, more than the file holds"
                )
            with archive.open(member) as file:
                arrays[name] = _read_npy(name, file.read())
    return arrays


def _read_npy(name: str, data: bytes) -> np.ndarray:
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read_header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    shape, fortran, dtype = read_header[version[0]](file)
    if dtype not in (np.float32, np.int8) or fortran:
        raise UserError(f"{name}: has the type {dtype}; must be float32")
    left = len(data) - file.tell()
    if math.prod(shape) * dtype.itemsize != left:
        raise UserError(f"{name}: has the shape {shape}, but {left} bytes of data")
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)


def _take(file: io.BytesIO, size: int, what: str) -> bytes:
    """Returns the next bytes. UserError: there are fewer."""
    left = len(file.getbuffer()) - file.tell()
    if size > left:
        raise UserError(f"{what}: needs {size} bytes, but the file ends after {left}")
    return file.read(size)


def _numbers(file: io.BytesIO, kind: str, count: int, what: str) -> tuple[int, ...]:
    layout = f"<{count}{kind}"
    return struct.unpack(layout, _take(file, struct.calcsize(layout), what))


def _read_bin(data: bytes) -> dict[str, np.ndarray]:
    file = io.BytesIO(data)
    version, count = _numbers(file, "Q", 2, "header") if len(data) >= 16 else (0, 0)
    if version != 1 or not 0 < count <= _MOST_ARRAYS:
        raise UserError("is no model of Marian: it is neither .npz nor version 1 of .bin")
    headers = [_numbers(file, "Q", 4, f"header of array {i}") for i in range(count)]
    names = [_read_name(file, header[0]) for header in headers]
    shapes = [_read_shape(file, *each) for each in zip(names, headers, strict=True)]
    (padding,) = _numbers(file, "Q", 1, "padding")
    _take(file, padding, "padding")
    arrays: dict[str, np.ndarray] = {}
    for name, shape, (_, kind, _, size) in zip(names, shapes, headers, strict=True):
        values = _read_values(name, kind, shape, _take(file, size, name))
        if name in arrays:
            raise UserError(f"{name}: occurs twice")
        if not name.endswith("_QuantMultA"):  # scales of activations in Marian's 8-bit products
            arrays[name] = values
    return arrays


def _read_name(file: io.BytesIO, length: int) -> str:
    if not 0 < length <= _LONGEST_NAME:
        raise UserError(f"name of an array: has {length} bytes; the file is damaged")
    return _take(file, length, "name of an array")[:-1].decode()


def _read_shape(file: io.BytesIO, name: str, header: tuple[int, ...]) -> tuple[int, ...]:
    if header[2] > _MOST_DIMENSIONS:
        raise UserError(f"{name}: has {header[2]} dimensions; the file is damaged")
    shape = _numbers(file, "i", header[2], f"shape of {name}")
    if min(shape, default=1) < 1:
        raise UserError(f"{name}: has the shape {shape}; the file is damaged")
    return shape


def _read_values(name: str, kind: int, shape: tuple[int, ...], data: bytes) -> np.ndarray:
    count = math.prod(shape)
    sizes = {_FLOAT32: 4 * count, _CHARACTERS: count, _INTGEMM8: count + 4}
    if kind not in sizes:
        raise UserError(f"{name}: has the type {kind:#x}; must be float32 or intgemm8")
    if sizes[kind] > len(data):
        raise UserError(f"{name}: has the shape {shape}, but {len(data)} bytes of data")
    if kind == _FLOAT32:
        return np.frombuffer(data, "<f4", count).reshape(shape)
    values = np.frombuffer(data, np.int8, count)
    if kind == _CHARACTERS:
        return values
    (multiplier,) = struct.unpack_from("<f", data, count)
    if not 1e-30 < multiplier < math.inf:
        raise UserError(f"{name}: has the multiplier {multiplier}; the file is damaged")
    values = values.astype(np.float32) / np.float32(multiplier)
    # Products take the transposed matrix; rows of embeddings are looked up.
    return values.reshape(shape) if name.endswith("Wemb") else values.reshape(shape[::-1]).T
