"""Keeps searches between runs as JAX exports them, so that a command need not trace its model.

JAX's compilation cache finds a compiled program by what tracing and lowering have made of it, which
takes longer than to load it. The files are beside those of JAX, and hold StableHLO.
"""

import hashlib
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import flax
import jax
from jax import export

from transformer_jax.attention.multi_head import KVCache
from transformer_jax.decoding.beam import Beam, Met
from transformer_jax.decoding.processors import Sentences
from transformer_jax.decoding.search import Chosen, Hypotheses, Progress
from transformer_jax.decoding.strategies import Lines
from transformer_jax.models.quantization import Quantized
from transformer_jax.parallel.compile import compile_function
from transformer_jax.parallel.program_cache import SEARCH
from transformer_jax.types import DecodeState, LayerState

_SEARCH = (Beam, Chosen, Hypotheses, Lines, Met, Progress, Sentences)
for _kind in (*_SEARCH, DecodeState, KVCache, LayerState, Quantized):
    export.register_namedtuple_serialization(
        _kind, serialized_name=f"transformer_jax.{_kind.__name__}"
    )

enabled = False
"""Whether to keep anything. Only the program itself knows that no code of its user runs in this
process, which may change the model."""

_DIGEST = hashlib.sha256().digest_size


class Exported:
    """A pure function of arrays on one device, which is traced once for all runs.

    It is compiled for the shapes of its arguments when it is first called with them. folder: that
    of the files. about: all that the result depends on besides the arguments and this package.
    options: those of `compile_function`.
    """

    def __init__(
        self, function: Callable[..., Any], *, folder: Path, about: str, **options: Any
    ) -> None:
        self._name, self._folder, self._about = function.__name__, folder, about
        self._compile = partial(compile_function, **options)
        self._function = self._compile(function)
        self._calls: dict[Any, Callable[..., Any]] = {}
        self._lock = threading.Lock()  # held while a call is made, which nothing does in parallel

    def __call__(self, *arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        shapes = tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if shapes not in self._calls:
            with self._lock:
                if shapes not in self._calls:
                    self._calls[shapes] = self._make_call(shapes, arguments)
        return self._calls[shapes](*arguments)

    def _make_call(self, shapes: Any, arguments: Any) -> Callable[..., Any]:
        """Returns the function for arguments of these shapes, from its file if there is one."""
        device = jax.devices()[0]  # on which the choice of an attention kernel depends
        about = device.platform, device.device_kind, self._about, shapes
        depends_on = repr((_package(), jax.config.values, *about))
        digest = hashlib.sha256(depends_on.encode()).hexdigest()
        path = self._folder / f"{self._name}-{digest}{SEARCH}"
        exported = _read(path)
        if exported is None:
            try:
                exported = export.export(self._function)(*arguments)
                content = exported.serialize()
            except ValueError:  # JAX does not export all kernels of all devices
                return self._function
            with suppress(OSError):  # which JAX warns of, for its own files
                path.write_bytes(zlib.compress(hashlib.sha256(content).digest() + content))
        return self._compile(exported.call)


def _read(path: Path) -> export.Exported | None:
    """Returns what a file holds; None: there is none, or it is damaged."""
    with suppress(OSError, zlib.error):
        content = zlib.decompress(path.read_bytes())
        if hashlib.sha256(content[_DIGEST:]).digest() == content[:_DIGEST]:
            return export.deserialize(bytearray(content[_DIGEST:]))
    return None


@cache
def _package() -> tuple[str, ...]:
    """Returns the digest of this package's code, and the versions of what traces it."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest(), jax.__version__, flax.__version__
