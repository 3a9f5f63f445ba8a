"""Every test checks the types and shapes of arrays, on eight emulated host devices."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from object_store import Bucket

    from transformer_jax.config import Config
    from transformer_jax.files import AnyPath
    from transformer_jax.runs.run import Run

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time is compilation, and without LLVM's optimization and the newer fusions it is
# an eighth. test_optimized.py runs some tests as users' programs are compiled. A jaxlib after 0.10
# aborts at the flag that turns the newer fusions off.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)

import jax
from jaxtyping import install_import_hook

# What is traced and compiled stays: looking for garbage in it is a fifth of the time of some tests.
gc.set_threshold(50_000, 20, 20)

# Before anything imports the package. Text has no arrays, and its many small calls take seconds.
CHECKED = {p.stem for p in (Path(__file__).parents[1] / "transformer_jax").iterdir()} - {"text"}
install_import_hook([f"transformer_jax.{name}" for name in CHECKED], "beartype.beartype")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first, so that no worker waits for one in the end."""
    items.sort(key=lambda item: "test_long.py" not in item.nodeid)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips the tests marked `gpu` where there is none."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU; JAX runs on {jax.default_backend()}")


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A program is compiled once for all tests that run it; nothing is in the user's caches."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of some thousand parameters on words in reverse; every kind of dropout is on."""
    from common import reversing_config

    return reversing_config(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def finished(tiny_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of `tiny_config`, trained to its end. Not to be changed."""
    from transformer_jax.training.trainer import train

    return train(tiny_config, tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture
def copied(finished: Run, tmp_path: Path) -> Run:
    """A copy of `finished` that a test may change."""
    return replace(finished, folder=Path(shutil.copytree(finished.folder, tmp_path / "copied")))


@pytest.fixture(scope="session")
def bucket() -> Iterator[Bucket]:
    """The bucket gs://bucket, served on this machine to all who would ask Google for it."""
    from object_store import Bucket

    served = Bucket("bucket")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", served.url)  # for gcsfs
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # would ask for its kind by gRPC
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", served.url)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")  # for TensorStore
        patch.setenv("NO_GCE_CHECK", "true")  # do not look for a machine of Google's
        yield served
    served.close()
    assert served.refused == []


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, bucket: Bucket) -> AnyPath:
    """An empty folder on a disk or in object storage."""
    from transformer_jax.files import find_path

    bucket.objects.clear()
    return tmp_path if request.param == "disk" else find_path("gs://bucket/runs/place")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small_arrays_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meshes split the arrays of tests, too, which have few elements."""
    monkeypatch.setattr("transformer_jax.parallel.parameters.MIN_SHARDED_SIZE", 64)


@pytest.fixture
def fixtures() -> Path:
    """The folder of reference data."""
    return Path(__file__).parent / "fixtures"


@pytest.fixture
def strict() -> Iterator[None]:
    """JAX neither adds dimensions nor changes types of its own accord."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield
