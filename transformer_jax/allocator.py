"""Settings of the C library's memory allocator, which a process reads when it starts."""

import ctypes
import os
import sys
from importlib.util import find_spec

ALLOCATOR = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:"
    "glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=100000000000:"
    "glibc.malloc.top_pad=67108864"
)
"""The value of GLIBC_TUNABLES. On a CPU, XLA allocates the temporaries of every step anew, and with
the default settings page faults take 15 to 35 % of a training step. There is one arena, since those
of other threads return memory to the system whatever the threshold: with them, the reference kernel
and its backward pass took 1.6 s at batch 8 and length 1,024, instead of 0.65 s."""


def restart_with_allocator() -> None:
    """Restarts this program with `ALLOCATOR` where JAX computes on the CPU.

    Does nothing if the user has set GLIBC_TUNABLES.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ and not _accelerated():
        environment = os.environ | {"GLIBC_TUNABLES": ALLOCATOR}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _accelerated() -> bool:
    """Returns whether JAX, which is not imported yet, will look for a GPU or TPU.

    The temporaries are then in the memory of the device, and a GPU's programs are compiled by many
    threads, which with one arena wait for each other most of the time.
    """
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return not platforms.startswith("cpu")
    return any(find_spec(plugins) is not None for plugins in ("jax_plugins", "libtpu"))


def give_memory_back() -> None:
    """Returns the allocator's freed memory to the system, which otherwise counts it as used."""
    trim = sys.platform == "linux" and getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:  # glibc has it
        trim(0)
