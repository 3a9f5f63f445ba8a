"""Memory settings of the C library that a program must have from its start."""

from __future__ import annotations

import ctypes
import os
import sys

ALLOCATOR = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:"
    "glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=100000000000:"
    "glibc.malloc.top_pad=67108864"
)
"""Read when a process starts: XLA on a CPU allocates a step's temporaries afresh each time, and
with the default settings page faults take 15 to 35 % of a training step. One arena: those of other
threads give memory back whatever the threshold, and the reference kernel with its backward pass
took 1.6 s at batch 8 and length 1,024 where it takes 0.65."""


def restart_with_allocator() -> None:
    """Starts this program anew under `ALLOCATOR`, unless the user has settings of their own."""
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        environment = os.environ | {"GLIBC_TUNABLES": ALLOCATOR}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def give_memory_back() -> None:
    """Gives what is freed and kept back to the system, which else counts it as taken."""
    trim = sys.platform == "linux" and getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:  # glibc has it
        trim(0)
