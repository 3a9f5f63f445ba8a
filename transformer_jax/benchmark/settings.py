"""What the benchmark of attention measures. Does not import JAX, so that `--help` stays fast."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from transformer_jax.errors import UserError

MaskName = Literal["full", "causal"]
DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class AttentionBenchmark:
    """Sizes, masks, types and kernels: every combination is measured."""

    lengths: Annotated[tuple[int, ...], arg(metavar="T")] = (64, 256, 1024, 4096)
    """Numbers of queries, and of keys."""
    batches: Annotated[tuple[int, ...], arg(metavar="B")] = (1, 8)
    """Batch sizes."""
    heads: Annotated[int, arg(metavar="N")] = 8
    """Heads of queries."""
    kv_heads: Annotated[int | None, arg(metavar="G")] = None
    """Heads of keys and values; default: heads."""
    head_size: Annotated[int, arg(metavar="H")] = 64
    """Width of a head."""
    masks: Annotated[tuple[MaskName, ...], arg(metavar="full|causal")] = ("full", "causal")
    """full: every query attends to all keys; causal: to those up to its own position."""
    dtypes: Annotated[tuple[DType, ...], arg(metavar="TYPE")] = ("float32",)
    """float32, bfloat16."""
    kernels: Annotated[tuple[str, ...], arg(metavar="KERNEL", help_behavior_hint="")] = ()
    """Names or MODULE:FUNCTION; default: all that support every combination here."""

    def __post_init__(self) -> None:
        """Raises UserError if a size is out of range."""
        for name in ("heads", "head_size", "kv_heads"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise UserError(f"{name}={size}: must be at least 1")
        for name in ("lengths", "batches"):
            sizes = getattr(self, name)
            if min(sizes, default=0) < 1:
                raise UserError(f"{name}={sizes}: must be one or more numbers of at least 1")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise UserError(f"kv_heads={self.kv_heads}: must divide heads={self.heads}")
