"""Peaks of accelerators, and the memory that a program may still allocate, there or on the host."""

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from transformer_jax.allocator import give_memory_back


class Accelerator(NamedTuple):
    """A device of one kind."""

    tflops: float  # peak of dense bfloat16 matmuls (float16 where there is no bfloat16)
    memory_gib: int | None = None  # None: the device itself reports it


ACCELERATORS: dict[str, Accelerator] = {
    "TPU v2": Accelerator(22.5, 8),  # a device is one of two cores of a chip
    "TPU v3": Accelerator(61.5, 16),  # likewise
    "TPU v4": Accelerator(275, 32),
    "TPU v5 lite": Accelerator(197, 16),
    "TPU v5": Accelerator(459, 95),
    "TPU v6 lite": Accelerator(918, 32),
    "V100": Accelerator(125),
    "T4": Accelerator(65),
    "A10G": Accelerator(70),
    "A10": Accelerator(125),
    "A100": Accelerator(312),
    "A30": Accelerator(165),
    "L40S": Accelerator(362),
    "L4": Accelerator(121),
    "H100 PCIe": Accelerator(756),
    "H100 NVL": Accelerator(835),
    "H100": Accelerator(989),
    "H200": Accelerator(989),
    "GH200": Accelerator(989),
    "B200": Accelerator(2250),
}
"""Accelerators by the words of a name, from the data sheets of Google and NVIDIA. The first that a
name has counts."""

USABLE = 0.6
"""Share of the host's free memory that a program may use: one that needed 80 % has been killed."""

_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def find_accelerator(device_kind: str) -> Accelerator | None:
    """Returns the accelerator of a kind such as "NVIDIA H100 80GB HBM3"; None: it is not listed."""
    words = f" {device_kind.replace('-', ' ')} "
    return next((each for name, each in ACCELERATORS.items() if f" {name} " in words), None)


def shortage(needed: int) -> str | None:
    """Returns a message if `needed` bytes cannot be allocated, else None."""
    stats = jax.devices()[0].memory_stats()
    free = stats["bytes_limit"] - stats["bytes_in_use"] if stats else usable_host_memory()
    return f"needs {needed:,} bytes, {free:,} are available" if needed > free else None


def peak_memory() -> int:
    """Returns the most bytes that the first device has held; on a CPU, this process."""
    if stats := jax.devices()[0].memory_stats():
        return stats["peak_bytes_in_use"]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def usable_host_memory() -> int:
    """Returns the bytes of host memory that a program may use.

    Not all free memory: what the allocator keeps of freed memory is fragmented.
    """
    give_memory_back()
    return int(USABLE * free_host_memory())


def free_host_memory(root: Path = Path("/")) -> int:
    """Returns the bytes that are free in the system and in every control group of this process."""
    system = root / "proc/meminfo"
    if not system.exists():
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":") for line in system.read_text("utf-8").splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *_free_in_groups(root)]))


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yields the free bytes of each control group with a limit: the process's own and those above.

    They are the limit less what is used, not counting the page cache that can be reclaimed.

    In a container the groups above its own may not be mounted, and its own stand at the top.
    """
    groups = root / "proc/self/cgroup"
    for line in groups.read_text("utf-8").splitlines() if groups.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, names = root / "sys/fs/cgroup", _VERSION_2
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", _VERSION_1
        else:
            continue
        group, (limit, usage, reclaimable) = top / path.strip("/"), names
        for folder in (group, *group.parents):
            file = folder / limit  # which only control groups have
            if file.exists() and (most := file.read_text("utf-8").strip()) != "max":
                statistics = (folder / "memory.stat").read_text("utf-8").splitlines()
                cache = int(dict(line.split() for line in statistics).get(reclaimable, 0))
                yield int(most) - int((folder / usage).read_text("utf-8")) + cache
