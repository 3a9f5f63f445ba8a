"""Marian's Transformer in NumPy, without the package's code."""

import struct
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]


def read(path: Path) -> Arrays:
    """Returns the arrays of a `.bin` of Firefox."""
    data, at, arrays = path.read_bytes(), 16, {}
    count = struct.unpack_from("<Q", data, 8)[0]
    headers = np.frombuffer(data, "<u8", 4 * count, at).reshape(count, 4).astype(int)
    at += headers.nbytes
    names, shapes = [], []
    for length in headers[:, 0]:
        names.append(data[at : at + length - 1].decode())
        at += length
    for rank in headers[:, 2]:
        shapes.append(np.frombuffer(data, "<i4", rank, at))
        at += 4 * rank
    at += 8 + struct.unpack_from("<Q", data, at)[0]
    for name, shape, (_, kind, _, size) in zip(names, shapes, headers, strict=True):
        elements = int(np.prod(shape))
        if kind == 0x404:
            arrays[name] = np.frombuffer(data, "<f4", elements, at).reshape(shape)
        elif not name.startswith("special") and "Quant" not in name:
            values = np.frombuffer(data, "i1", elements, at)
            values = values / np.frombuffer(data, "<f4", 1, at + elements)
            whole = name == "Wemb"
            arrays[name] = values.reshape(shape) if whole else values.reshape(shape[::-1]).T
        at += size
    return arrays


class Oracle:
    """Computes logits over Marian's ids for one sentence, in float64 or in `dtype`."""

    def __init__(
        self, arrays: Arrays, heads: int, pre: bool = False, dtype: type = np.float64
    ) -> None:
        self.arrays = {name: array.astype(dtype) for name, array in arrays.items()}
        self.heads, self.pre, self.dtype, self.gelu = heads, pre, dtype, False

    def logits(self, source: list[int], target: list[int]) -> np.ndarray:
        """Returns the logits [T + 1, V] of what follows the beginning and each id of `target`."""
        memory = self.embed("encoder_Wemb", source)
        for layer in self.layers("encoder"):
            memory = self.attend(f"{layer}_self", memory)
            memory = self.feed_forward(layer, memory)
        memory = self.top("encoder", memory)
        x = self.embed("decoder_Wemb", target, begin=True)
        for layer in self.layers("decoder"):
            recurrent = f"{layer}_rnn_W" in self.arrays
            x = self.recur(f"{layer}_rnn", x) if recurrent else self.attend(f"{layer}_self", x)
            x = self.attend(f"{layer}_context", x, memory)
            x = self.feed_forward(layer, x)
        table = self.table("decoder_Wemb").T
        matrix = self.arrays.get("decoder_ff_logit_out_W", table)
        return self.top("decoder", x) @ matrix + self.arrays.get("decoder_ff_logit_out_b", 0)

    def layers(self, stack: str) -> list[str]:
        """Returns the prefixes of the layers' names, of which there are fewer than 10."""
        return sorted({name[:10] for name in self.arrays if name.startswith(f"{stack}_l")})

    def table(self, name: str) -> np.ndarray:
        return self.arrays["Wemb" if "Wemb" in self.arrays else name]

    def embed(self, name: str, ids: list[int], begin: bool = False) -> np.ndarray:
        x = self.table(name)[ids]
        x = np.concatenate([np.zeros((int(begin), x.shape[1])), x])
        if "Wpos" in self.arrays:
            return (x + self.arrays["Wpos"][: len(x)]).astype(self.dtype)
        half = x.shape[1] // 2
        angles = np.arange(len(x))[:, None] / 10000 ** (np.arange(half) / (half - 1))
        waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        return (x * x.shape[1] ** 0.5 + waves).astype(self.dtype)

    def dense(self, x: np.ndarray, prefix: str, name: str) -> np.ndarray:
        return x @ self.arrays[f"{prefix}_W{name}"] + self.arrays.get(f"{prefix}_b{name}", 0)

    def norm(self, x: np.ndarray, name: str, suffix: str = "") -> np.ndarray:
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
        scale, bias = (self.arrays[f"{name}_ln_{kind}{suffix}"] for kind in ("scale", "bias"))
        return x * scale + bias

    def before(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.norm(x, name, "_pre") if self.pre else x

    def after(self, x: np.ndarray, name: str) -> np.ndarray:
        return x if self.pre else self.norm(x, name)

    def top(self, stack: str, x: np.ndarray) -> np.ndarray:
        return self.norm(x, f"{stack}_top") if self.pre else x

    def attend(self, prefix: str, x: np.ndarray, memory: np.ndarray | None = None) -> np.ndarray:
        """Attends to the memory, or to x itself, causally in the decoder."""
        y = self.before(x, f"{prefix}_Wo")
        keys = y if memory is None else memory
        inputs = {"q": y, "k": keys, "v": keys}
        q, k, v = (
            self.dense(value, prefix, name).reshape(len(value), self.heads, -1).swapaxes(0, 1)
            for name, value in inputs.items()
        )
        scores = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
        if memory is None and prefix.startswith("decoder"):
            scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        context = (weights / weights.sum(-1, keepdims=True)) @ v
        y = self.dense(context.swapaxes(0, 1).reshape(len(x), -1), prefix, "o")
        return self.after(x + y, f"{prefix}_Wo")

    def feed_forward(self, layer: str, x: np.ndarray) -> np.ndarray:
        y = self.dense(self.before(x, f"{layer}_ffn_ffn"), f"{layer}_ffn", "1")
        y = y / (1 + np.exp(-1.702 * y)) if self.gelu else np.maximum(y, 0)
        return self.after(x + self.dense(y, f"{layer}_ffn", "2"), f"{layer}_ffn_ffn")

    def recur(self, prefix: str, x: np.ndarray) -> np.ndarray:
        y = self.before(x, f"{prefix}_ffn")
        forget = 1 / (1 + np.exp(-self.dense(y, prefix, "f")))
        new, cells = (1 - forget) * self.dense(y, prefix, ""), [np.zeros(x.shape[1], x.dtype)]
        for f, u in zip(forget, new, strict=True):
            cells.append(f * cells[-1] + u)
        return self.after(x + np.maximum(np.stack(cells[1:]), 0), f"{prefix}_ffn")
