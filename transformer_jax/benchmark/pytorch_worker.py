"""Runs PyTorch's attention in a process of its own, where no other library's threads run.

    python -m transformer_jax.benchmark.pytorch_worker

Reads requests from standard input and writes a reply to each to standard output. A message is a
line of JSON; the float32 arrays whose shapes it lists follow it as bytes. Imports no JAX.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Any

import numpy as np

from transformer_jax.allocator import give_memory_back
from transformer_jax.benchmark.timing import seconds_per_call

Message = tuple[dict[str, Any], list[np.ndarray]]


def send(stream: IO[bytes], message: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
    """Writes a message."""
    arrays = [np.ascontiguousarray(array, np.float32) for array in arrays]
    header = message | {"arrays": [array.shape for array in arrays]}
    stream.write(json.dumps(header).encode() + b"\n")
    for array in arrays:
        stream.write(array.data)
    stream.flush()


def receive(stream: IO[bytes]) -> Message | None:
    """Returns the next message; None at the end of the stream."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    message = json.loads(line)
    arrays = []
    for shape in message.pop("arrays"):
        size = 4 * math.prod(shape)
        content = bytearray(stream.read(size))
        if len(content) < size:
            return None
        arrays.append(np.frombuffer(content, np.float32).reshape(shape))
    return message, arrays


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answers requests until the stream ends.

    The first message, without a request, says what runs here. "load" takes query, key, value and
    the output's gradient; "time" and "run" call what is loaded; "unload" frees it.
    """
    torch: Any = importlib.import_module("torch")
    send(replies, {"version": str(torch.__version__), "threads": torch.get_num_threads()})
    call: Callable[[], list[Any]] = list
    while (received := receive(requests)) is not None:
        request, arrays = received
        try:
            match request["do"]:
                case "load":
                    call = attention(torch, arrays, **request["options"])
                    send(replies, {})
                case "time":
                    send(replies, {"seconds": seconds_per_call(call, request["count"])})
                case "run":
                    send(replies, {}, [x.detach().float().cpu().numpy() for x in call()])
                case "unload":
                    call = list
                    give_memory_back()
                    send(replies, {})
                case unknown:
                    raise ValueError(f"{unknown}: no such request")
        except RuntimeError as error:
            send(replies, {"error": str(error)})


def attention(
    torch: Any, arrays: Sequence[np.ndarray], device: str, dtype: str, causal: bool, backward: bool
) -> Callable[[], list[Any]]:
    """Returns a call of `scaled_dot_product_attention` that waits for its results.

    Its results are the output and, with `backward`, the gradients of query, key and value.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("this PyTorch has no CUDA")
    *inputs, gradient = (
        torch.from_numpy(array).to(device, getattr(torch, dtype)) for array in arrays
    )
    run = partial(
        torch.nn.functional.scaled_dot_product_attention,
        is_causal=causal,
        enable_gqa=inputs[0].shape[1] != inputs[1].shape[1],
    )

    def forward() -> list[Any]:
        with torch.no_grad():
            return [run(*inputs)]

    def both() -> list[Any]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = run(*leaves)
        output.backward(gradient)
        return [output, *(x.grad for x in leaves)]

    def synchronized() -> list[Any]:
        results = both() if backward else forward()
        if device == "cuda":
            torch.cuda.synchronize()
        return results

    return synchronized


def main() -> None:
    """Serves, and sends whatever libraries print to standard error."""
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
