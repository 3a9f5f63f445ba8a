"""Free memory is the least of what the system and its control groups leave."""

from pathlib import Path

import pytest

from transformer_jax.parallel.devices import free_host_memory

SYSTEM = {"proc/meminfo": "MemTotal: 4000 kB\nMemAvailable: 3000 kB\n"}
OWN_GROUP = {"proc/self/cgroup": "0::/jobs/one\n"}


def version_2(used: int, cache: int, limit: str = "100000") -> dict[str, str]:
    """Returns the files of a control group."""
    statistics = f"anon 1\ninactive_file {cache}\nactive_file 7\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": statistics}


def version_1(limit: int, used: int, cache: int) -> dict[str, str]:
    """Returns the files of a control group of the first version."""
    statistics = f"inactive_file 5\ntotal_inactive_file {cache}\n"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    return dict(zip(names, (str(limit), str(used), statistics), strict=True))


def within(folder: str, files: dict[str, str]) -> dict[str, str]:
    """Returns the files with the folder before their names."""
    return {f"{folder}/{name}": text for name, text in files.items()}


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
UNLIMITED = 2**63 - 4096
OWN = f"{V2}/jobs/one"

CASES = {
    "no groups": ({}, 3_072_000),
    "no limit": (OWN_GROUP | within(OWN, version_2(9, 0, "max")), 3_072_000),
    "page cache is reclaimable": (OWN_GROUP | within(OWN, version_2(30000, 20000)), 90_000),
    "a limit above": (
        OWN_GROUP | within(OWN, version_2(30000, 0)) | within(f"{V2}/jobs", version_2(40000, 0)),
        60_000,
    ),
    "more is used than the limit": (OWN_GROUP | within(OWN, version_2(130000, 0)), 0),
    "a container, whose own group is at the top": (
        {"proc/self/cgroup": "0::/\n"} | within(V2, version_2(30000, 0)),
        70_000,
    ),
    "version 1": (
        {"proc/self/cgroup": "5:cpu:/jobs\n4:memory:/jobs\n0::/\n"}
        | within(V1, version_1(UNLIMITED, 50, 0))
        | within(f"{V1}/jobs", version_1(200000, 50000, 10000)),
        160_000,
    ),
    "version 1, a container whose group above is not mounted": (
        {"proc/self/cgroup": "4:cpu,memory:/host/abc\n"} | within(V1, version_1(200000, 50000, 0)),
        150_000,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_free_memory_is_the_least_that_is_left(name: str, tmp_path: Path) -> None:
    files, wanted = CASES[name]
    for path, text in (SYSTEM | files).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, "utf-8")
    assert free_host_memory(tmp_path) == wanted


def test_without_proc_there_is_memory_too(tmp_path: Path) -> None:
    assert free_host_memory(tmp_path) > 0
