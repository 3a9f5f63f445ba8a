"""Marian's Transformer with SSRU in float32 NumPy, read from a `.bin` without the package's code."""

import struct
from pathlib import Path

import numpy as np


def read(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a post-norm model, 8-bit ones as float32."""
    data, at = path.read_bytes(), 16
    count = struct.unpack_from("<Q", data, 8)[0]
    headers = np.frombuffer(data, "<u8", 4 * count, at).reshape(count, 4)
    at += headers.nbytes
    names, shapes, arrays = [], [], {}
    for length in headers[:, 0]:
        names.append(data[at : at + int(length) - 1].decode())
        at += int(length)
    for rank in headers[:, 2]:
        shapes.append(np.frombuffer(data, "<i4", int(rank), at))
        at += 4 * int(rank)
    at += 8 + struct.unpack_from("<Q", data, at)[0]
    for name, shape, (_, kind, _, size) in zip(names, shapes, headers, strict=True):
        elements = int(np.prod(shape))
        if kind == 0x404:
            arrays[name] = np.frombuffer(data, "<f4", elements, at).reshape(shape)
        elif not name.startswith("special") and "Quant" not in name:
            scale = np.frombuffer(data, "<f4", 1, at + elements)
            values = np.frombuffer(data, "i1", elements, at) / scale
            straight = name == "Wemb"
            arrays[name] = values.reshape(shape) if straight else values.reshape(shape[::-1]).T
        at += int(size)
    return arrays


def positions(length: int, width: int) -> np.ndarray:
    half = width // 2
    angles = np.arange(length)[:, None] / 10000 ** (np.arange(half) / (half - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


class Oracle:
    """Computes logits over Marian's ids for one sentence."""

    def __init__(self, path: Path, heads: int = 8) -> None:
        self.arrays, self.heads = read(path), heads

    def logits(self, source: list[int], target: list[int]) -> np.ndarray:
        """Returns the logits [T + 1, V] of each id after the beginning and after each of `target`."""
        memory = self.embed(source)
        for layer in self.layers("encoder"):
            memory = self.attend(f"{layer}_self", memory, memory)
            memory = self.feed_forward(layer, memory)
        x = self.embed(target, begin=True)
        for layer in self.layers("decoder"):
            x = self.recur(f"{layer}_rnn", x)
            x = self.attend(f"{layer}_context", x, memory)
            x = self.feed_forward(layer, x)
        return x @ self.arrays["Wemb"].T + self.arrays["decoder_ff_logit_out_b"]

    def layers(self, stack: str) -> list[str]:
        return sorted({name[: len("encoder_l1")] for name in self.arrays if name.startswith(stack + "_l")})

    def embed(self, ids: list[int], begin: bool = False) -> np.ndarray:
        table = self.arrays["Wemb"]
        x = table[ids] * np.sqrt(table.shape[1])
        x = np.concatenate([np.zeros((int(begin), table.shape[1])), x])
        return x + positions(len(x), table.shape[1])

    def dense(self, x: np.ndarray, prefix: str, name: str) -> np.ndarray:
        bias = self.arrays.get(f"{prefix}_b{name}", 0)
        return x @ self.arrays[f"{prefix}_W{name}"] + bias

    def add_and_norm(self, name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        z = x + y
        z = (z - z.mean(1, keepdims=True)) / np.sqrt(z.var(1, keepdims=True) + 1e-6)
        return z * self.arrays[f"{name}_ln_scale"] + self.arrays[f"{name}_ln_bias"]

    def attend(self, prefix: str, x: np.ndarray, memory: np.ndarray) -> np.ndarray:
        split = lambda y: y.reshape(len(y), self.heads, -1).swapaxes(0, 1)
        q, k, v = (split(self.dense(y, prefix, n)) for y, n in ((x, "q"), (memory, "k"), (memory, "v")))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        context = (weights / weights.sum(-1, keepdims=True)) @ v
        joined = context.swapaxes(0, 1).reshape(len(x), -1)
        return self.add_and_norm(f"{prefix}_Wo", x, self.dense(joined, prefix, "o"))

    def feed_forward(self, layer: str, x: np.ndarray) -> np.ndarray:
        hidden = np.maximum(self.dense(x, f"{layer}_ffn", "1"), 0)
        return self.add_and_norm(f"{layer}_ffn_ffn", x, self.dense(hidden, f"{layer}_ffn", "2"))

    def recur(self, prefix: str, x: np.ndarray) -> np.ndarray:
        forget = 1 / (1 + np.exp(-self.dense(x, prefix, "f")))
        new, cell, cells = (1 - forget) * self.dense(x, prefix, ""), np.zeros(x.shape[1]), []
        for f, u in zip(forget, new, strict=True):
            cell = f * cell + u
            cells.append(cell)
        return self.add_and_norm(f"{prefix}_ffn", x, np.maximum(np.stack(cells), 0))
