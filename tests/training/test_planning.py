"""Plans are those of the compiled programs. Eight emulated host devices."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import pytest
from common import tiny

from tools.collectives import collectives
from transformer_jax.config import Config, ExecutionConfig, MeshConfig, OptimizerConfig
from transformer_jax.data.buckets import Shape
from transformer_jax.models.parameter_paths import split
from transformer_jax.training import planning
from transformer_jax.training.planning import (
    Planner,
    compile_gradients,
    device_memory,
    remedies,
    temporary_bytes,
)

SHAPE = Shape(180, 24, 32)
IDS = (40, 40)
DATA, ALL = MeshConfig(data=8), MeshConfig(data=2, fsdp=2, tensor=2)


pytestmark = pytest.mark.usefixtures("small_arrays_are_split")


def planner(mesh: MeshConfig, devices: Any = None, **changes: Any) -> Planner:
    config = Config(model=tiny(d_model=32, d_ff=64, max_length=32, dropout=0.1), mesh=mesh)
    return Planner(replace(config, **changes), IDS, devices)


@cache
def compiled(mesh: MeshConfig, remat: Any = "none") -> Any:
    plan = planner(mesh, execution=ExecutionConfig(remat=remat))
    return compile_gradients(plan.setup, plan.shape(SHAPE))


@pytest.mark.parametrize("mesh", [DATA, pytest.param(ALL, marks=pytest.mark.slow)])
def test_bytes_are_those_of_the_programs_arguments(mesh: MeshConfig) -> None:
    here, absent, rng = planner(mesh), planner(mesh, 8), jax.random.key(0)
    assert here.shape(SHAPE) == (184 if mesh is DATA else 180, 24, 32)
    memory = here.memory(SHAPE)
    assert memory == absent.memory(SHAPE)
    arguments = compiled(mesh).memory_analysis().argument_size_in_bytes
    scalars = 4 + jax.random.key_data(rng).nbytes  # the step is another
    assert memory.params + memory.batch + scalars == arguments
    state = jax.tree.leaves(here.setup.compile_init()(rng))
    assert memory.params + memory.rest == sum(x.addressable_shards[0].data.nbytes for x in state)


def test_devices_exchange_the_gradients_once() -> None:
    """Also those of the tied embeddings, which are used three times."""
    exchanged = collectives(compiled(DATA))
    assert exchanged.keys() == {"all-reduce"}
    gradients = planner(DATA).memory(SHAPE).params
    assert gradients <= exchanged["all-reduce"].bytes <= gradients + 64  # and a few scalars


def assert_estimated(plan: Planner, true: int) -> None:
    assert 0.9 * true < plan.memory(SHAPE).temporaries < 1.6 * true


@pytest.mark.slow
def test_temporaries_are_estimated_from_what_is_kept() -> None:
    """Rematerialization keeps fewer arrays, and the estimate follows."""
    true = []
    for remat in ("none", "layers"):
        plan = planner(DATA, execution=ExecutionConfig(remat=remat))
        true.append(temporary_bytes(compiled(DATA, remat)))
        assert_estimated(plan, true[-1])
    assert true[1] < 0.8 * true[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "accumulate"),
    [(DATA, 4), (MeshConfig(data=2, fsdp=4), 1), (MeshConfig(data=2, tensor=4), 1), (ALL, 2)],
)
def test_so_are_those_of_parts(mesh: MeshConfig, accumulate: int) -> None:
    """The parameters of this model need most of the memory."""
    model = tiny(d_model=256, d_ff=1024, heads=4, max_length=32, dropout=0.1)
    options = OptimizerConfig(accumulate=accumulate)
    plan = planner(mesh, model=model, optimizer=options)
    assert_estimated(plan, plan.compiled(SHAPE)[0].temporaries)


def test_microbatches_follow_from_the_devices() -> None:
    """The batch is the same on any of them: 4,096 tokens, in parts of at most 300 a device."""
    options = OptimizerConfig(microbatch_tokens=300)
    wanted = {1: (14, 182), 8: (2, 192), 64: (1, 192)}
    for devices, (count, rows) in wanted.items():
        plan = planner(MeshConfig(), devices, optimizer=options)
        assert (plan.setup.microbatches, plan.shape(SHAPE).rows) == (count, rows)
    few = planner(MeshConfig(), 8, optimizer=OptimizerConfig(accumulate=2))
    plan = planner(MeshConfig(), 8, optimizer=options)
    assert plan.memory(SHAPE) == few.memory(SHAPE)
    assert plan.setup.describe_devices().endswith("; 2 microbatches a step")
    halved = list(remedies(plan, [SHAPE], sum(plan.memory(SHAPE)) - 1))
    assert halved[0].option == "--config.optimizer.microbatch_tokens=150"


@pytest.mark.slow
def test_remedies_fit() -> None:
    plan = planner(MeshConfig(), 64)
    large = SHAPE._replace(rows=2048)
    limit = 2 * sum(plan.memory(large)) // 3
    fitting = list(remedies(plan, [large, large._replace(source=8)], limit))
    fields = [remedy.option.partition("=")[0] for remedy in fitting]
    names = ("optimizer.accumulate", "execution.remat", "data.batch_tokens")
    assert fields == [f"--config.{name}" for name in names]
    assert all(remedy.memory <= limit for remedy in fitting)
    assert fitting[0].operations == 1
    assert fitting[2].operations == pytest.approx(0.5)
    changed = plan.variant("optimizer", accumulate=int(fitting[0].option.partition("=")[2]))
    assert sum(changed.memory(large)) == fitting[0].memory
    small = Shape(64, 2, 2)
    sharded = list(remedies(plan, [small], sum(plan.memory(small)) * 3 // 5))
    assert [remedy.option for remedy in sharded] == ["--config.mesh.fsdp=4"]


@pytest.mark.slow
def test_remedies_are_configs_that_train() -> None:
    """pmap has no fsdp, and batches have at least 8 rows."""
    plan = planner(MeshConfig(), 64, execution=ExecutionConfig(executor="pmap"))
    rows, kept = Shape(64, 2, 2), sum(plan.memory(Shape(64, 2, 2))[:2])
    assert list(remedies(plan, [rows], kept // 2)) == []
    alone = planner(MeshConfig(), 1)
    limit = sum(alone.memory(SHAPE._replace(rows=16))) * 9 // 10
    halved = [remedy.option for remedy in remedies(alone, [SHAPE._replace(rows=16)], limit)]
    assert halved[-1] == "--config.data.batch_tokens=2048"
    shapes = [SHAPE._replace(rows=16), Shape(8, 32, 24)]
    assert halved[:-1] == [remedy.option for remedy in remedies(alone, shapes, limit)]


def test_emulated_devices_share_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Including the limit of a container, which `usable_host_memory` respects."""
    monkeypatch.setattr(planning, "usable_host_memory", lambda: 6400)
    assert device_memory(planner(DATA).setup.mesh) == 800
    assert device_memory(planner(MeshConfig(), 64).setup.mesh) == 100


@pytest.mark.slow
def test_plans_count_what_is_trained() -> None:
    """Fewer moments and gradients. A frozen encoder has no backward pass if its embeddings are
    frozen, too, and else only that of its inputs."""

    def plan(*frozen: str) -> Planner:
        return planner(MeshConfig(), 1, optimizer=OptimizerConfig(ema=0.9, frozen=frozen))

    plans = [plan(), plan("encoder"), plan("encoder", "embeddings")]
    flops = [each.flops(SHAPE) for each in plans]
    assert flops[0] > flops[1] > flops[2]
    frozen = split(plans[0].setup.abstract_state.params, ["encoder"])[0]
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(frozen))
    before, after = (each.memory(SHAPE) for each in plans[:2])
    assert before.rest - after.rest == 3 * size  # two moments and the average
    assert before.params == after.params
    counts = [plans[1].variant("optimizer", accumulate=count) for count in (1, 2)]
    # What the forward pass keeps and the gradients, or half of that and the gradients twice.
    once, twice = (each.memory(SHAPE).temporaries for each in counts)
    assert abs((2 * twice - once) - 3 * (after.params - size)) <= 2
