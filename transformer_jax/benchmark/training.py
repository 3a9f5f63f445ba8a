"""Measures training steps by part, beside their matmuls alone and PyTorch (`bench train`)."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.benchmark import pytorch
from transformer_jax.benchmark.pytorch_training import Training
from transformer_jax.benchmark.timing import Samples, time_in_turns, timer
from transformer_jax.config import BASE, BIG, SMALL, TINY, Config, TokenizerConfig
from transformer_jax.data.buckets import Plan, Shape
from transformer_jax.data.dataset import Examples
from transformer_jax.data.loader import make_batch
from transformer_jax.data.order import random_order
from transformer_jax.errors import UserError
from transformer_jax.flops import Product, products
from transformer_jax.parallel.compile import compile_function
from transformer_jax.parallel.devices import peak_memory
from transformer_jax.parallel.mesh import local_shard, make_mesh, replicate, shard_batch
from transformer_jax.special_ids import EOS, PAD
from transformer_jax.training.planning import Planner, device_memory
from transformer_jax.training.setup import StepSetup, check_config, prepare_step, set_up
from transformer_jax.training.step import TrainState
from transformer_jax.types import Batch, Key

PRESETS = {
    "tiny": Config(model=TINY, tokenizer=TokenizerConfig(vocabulary=4000)),
    "small": Config(model=SMALL, tokenizer=TokenizerConfig(vocabulary=8000)),
    "base": Config(model=BASE, tokenizer=TokenizerConfig(vocabulary=32_000)),
    "big": Config(model=BIG, tokenizer=TokenizerConfig(vocabulary=32_000)),
}
"""Configs of full rows, by the name of their model."""
MAX_SECONDS = 120.0
"""Seconds of the samples of each contender, unless the fewest take longer."""
PRODUCT_SAMPLES = 5

Record = dict[str, Any]


class Workload(NamedTuple):
    """The batches that all contenders pass over. examples: what they are made of; None: random."""

    setup: StepSetup
    batches: list[Batch]
    examples: Examples | None

    @property
    def shapes(self) -> list[Shape]:
        """The shape of each batch."""
        both = [(batch.source.shape, batch.target_out.shape) for batch in self.batches]
        return [Shape(rows, source, target) for (rows, source), (_, target) in both]


def full_rows(config: Config, shape: Shape) -> Workload:
    """Returns a batch of random ids without padding. UserError: it does not fit into memory, or as
    `check_config`."""
    longest = max(config.model.max_length, shape.source, shape.target)
    config = config.changed(model={"max_length": longest})
    check_config(config)
    size = config.tokenizer.vocabulary
    mesh = make_mesh(config.mesh)
    setup = prepare_step(config, (size, size), mesh)
    shape = shape.padded(local_shard(mesh, setup.microbatches).devices)
    needed, limit = sum(Planner(config, (size, size)).memory(shape)), device_memory(mesh)
    if 0 < limit < needed:
        raise UserError(
            f"--rows={shape.rows} --length={shape.source}: a step needs {needed:,} bytes of "
            f"{limit:,}; give fewer rows, or --config.execution.remat=layers"
        )
    draw = partial(np.random.default_rng(0).integers, EOS + 1, size, dtype=np.int32)
    target = draw(size=(shape.rows, shape.target))
    batch = Batch(draw(size=(shape.rows, shape.source)), target, target)
    return Workload(setup, [batch], None)


def real_text(config: Config, count: int) -> Workload:
    """Returns the first batches of a training. UserError: as `check_config` and `load_data`."""
    check_config(config)
    setup = set_up(config.changed(data={"dev": ()}))
    batches = [loaded.batch for loaded in islice(setup.loader.batches(), count)]
    return Workload(setup, batches, setup.examples)


def measure(work: Workload, samples: int) -> Record:
    """Returns the times of steps, of their parts and of PyTorch's steps, all in turns.

    Times are seconds of a pass over the batches. matmuls_s: of the matmuls of the steps alone, each
    at the best rate that was measured for its shape; None on several devices.
    """
    setup, batches = work.setup, work.batches
    tokens, slots = count_tokens(batches)
    vocabularies = setup.model.source_vocabulary, setup.model.target_vocabulary
    memory, _ = Planner(setup.config, vocabularies).compiled(max(work.shapes))
    record: Record = {
        "devices": setup.describe_devices(),
        "parameters": sum(x.size for x in jax.tree.leaves(setup.abstract_state.params)),
        "shapes": [list(shape) for shape in dict.fromkeys(work.shapes)],
        "batches": len(batches),
        "tokens": tokens,
        "fill": tokens / slots,
        "state_mib": sum(memory[:3]) / 2**20,
        "temporaries_mib": memory.temporaries / 2**20,
    }
    with ExitStack() as stack:
        started = _start_peers(work, stack)
        calls, record["first_step_s"] = passes(work)
        calls["step"]()
        record["peak_mib"] = peak_memory() / 2**20  # before the parts' programs take more
        timers = {name: timer(call) for name, call in calls.items()}
        timers |= {name: partial(peer.ask, "time") for name, peer in started.items() if peer.ready}
        times = time_in_turns(timers, samples, MAX_SECONDS)
    floor = _seconds_of_matmuls(work) if setup.mesh.size == 1 else None
    step, forward, both, update = (times[n] for n in ("step", "forward", "gradients", "optimizer"))
    return record | {
        "step": _summary(step, tokens),
        "forward_s": forward.median,
        "backward_s": both.median - forward.median,
        "optimizer_s": update.median,
        "matmuls_s": floor,
        "share_of_matmuls": floor and floor / step.median,
        "pytorch": [
            peer.record | (_beside(times[name], peer.tokens, step, tokens) if peer.ready else {})
            for name, peer in started.items()
        ],
    }


def count_tokens(batches: Sequence[Batch]) -> tuple[int, int]:
    """Returns the number of target tokens, and that of the slots for them."""
    targets = [batch.target_out for batch in batches]
    return sum(int((x != PAD).sum()) for x in targets), sum(x.size for x in targets)


def _summary(times: Samples, tokens: int) -> Record:
    return {
        "median_s": times.median,
        "tokens_per_s": tokens / times.median,
        "tokens_per_s_spread": [tokens / seconds for seconds in reversed(times.quartiles)],
        "samples": len(times.values),
    }


def _beside(times: Samples, tokens: int, step: Samples, our_tokens: int) -> Record:
    """Returns what follows from PyTorch's times. ratio: our tokens a second over its own, the
    median over the turns."""
    ratio = Samples(tuple(x * our_tokens / tokens for x in times.over(step).values))
    return _summary(times, tokens) | {"ratio": ratio.median, "ratio_spread": ratio.quartiles}


def passes(work: Workload) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Returns calls that pass over the batches: with the loss alone, with its gradients, with the
    optimizer's updates, and with whole steps; and the seconds of a first step, when its programs
    are compiled, and when JAX's cache holds them."""
    setup, mesh = work.setup, work.setup.mesh
    key = replicate(jax.random.key(0), mesh)
    batches = [shard_batch(batch, mesh) for batch in work.batches]
    init, first_s = setup.compile_init(), {}
    for name in ("compiled", "cached"):
        jax.clear_caches()
        state, began = init(key), time.perf_counter()
        compute, apply = setup.compile_gradients(), setup.compile_apply()
        jax.block_until_ready(apply(state, *compute(state, batches[0], key)))
        first_s[name] = time.perf_counter() - began
    state = [init(key)]

    def loss(state: TrainState, batch: Batch, key: Key) -> Any:
        return setup.loss(state.params, batch, key, state.averages)

    parts = {"forward": compile_function(loss, mesh, result=None), "gradients": compute}

    def run(part: str) -> None:
        for batch in batches:
            jax.block_until_ready(parts[part](state[0], batch, key))

    @cache
    def gradient() -> Any:
        return compute(state[0], batches[0], key)

    def updates() -> None:
        for _ in batches:
            state[0], _ = apply(state[0], *gradient())
        jax.block_until_ready(state)

    def steps() -> None:
        for batch in batches:
            state[0], _ = apply(state[0], *compute(state[0], batch, key))
        jax.block_until_ready(state)

    calls = {"step": steps, "optimizer": updates}
    return calls | {name: partial(run, name) for name in parts}, first_s


def _seconds_of_matmuls(work: Workload) -> float:
    """Returns the seconds of all matmuls of a pass, each at the best rate of its shape."""
    setup, key, best = work.setup, jax.random.key(0), dict[Any, float]()
    total = 0.0
    for batch in work.batches:
        trace = jax.make_jaxpr(setup.update)(setup.abstract_state, batch, key)
        for product in products(trace.jaxpr):
            kind = str([x.aval for x in product.equation.invars]), str(product.equation.params)
            if kind not in best:
                best[kind] = _best_seconds(product)
            total += product.times * best[kind]
    return total


def _best_seconds(product: Product) -> float:
    equation = product.equation
    inputs = [jnp.ones(x.aval.shape, x.aval.dtype) for x in equation.invars]
    call = jax.jit(partial(equation.primitive.bind, **equation.params))
    run = timer(lambda: jax.block_until_ready(call(*inputs)))
    return min(time_in_turns({"": run}, PRODUCT_SAMPLES)[""].values)


class Peer(NamedTuple):
    """PyTorch in a process of its own, with the batches that it passes over."""

    ask: pytorch.Worker
    tokens: int
    record: Record

    @property
    def ready(self) -> bool:
        """Whether it has made a step."""
        return "failed" not in self.record


def _start_peers(work: Workload, stack: ExitStack) -> dict[str, Peer]:
    """Returns PyTorch's ways to train by name, with each allocator: of full rows with and without
    `torch.compile`; of text in shuffled and in bucketed batches."""
    config, peers = work.setup.config, {}
    model, platform = config.model, jax.default_backend()
    sizes = {x: getattr(model, x) for x in ("d_model", "d_ff", "heads", "dropout", "dtype")}
    sizes |= {"vocabulary": work.setup.model.target_vocabulary}
    sizes |= dict(zip(("layers", "decoder_layers"), model.depths, strict=True))
    if work.examples is None:
        ways = {name: (work.batches, name == "compiled") for name in ("eager", "compiled")}
    else:
        make = partial(_peer_batches, work.examples, config, count_tokens(work.batches)[0])
        ways = {name: (list(make(name == "bucketed")), False) for name in ("shuffled", "bucketed")}
    for way, (batches, compiled) in ways.items():
        arrays = [tuple(np.asarray(x) for x in batch[:3]) for batch in batches]
        tokens, slots = count_tokens(batches)
        for allocator, ask in stack.enter_context(pytorch.workers(platform, Training)).items():
            record: Record = {"way": way, "allocator": allocator, "fill": tokens / slots}
            record["batches"] = len(batches)
            with pytorch.failure_in(record):
                record |= ask("load", sizes, arrays, platform, compiled)
                ask("time", 1)
            peers[f"{way}, {allocator}"] = Peer(ask, tokens, record)
    return peers


def _peer_batches(examples: Examples, config: Config, tokens: int, bucket: bool) -> Iterator[Batch]:
    """Yields batches of shuffled pairs, until they have this number of target tokens.

    Without `bucket`, pairs as they come, as in tutorials. With it, pools of pairs are sorted by
    length, and each batch has up to `data.batch_tokens` target slots, as in good toolkits.
    """
    lengths = examples.lengths_of(np.arange(len(examples)))
    slots, order = config.data.batch_tokens, random_order(len(examples), 0)
    rows = max(1, slots // int(lengths[:, 1].mean()))
    if bucket:
        pools = np.split(order, range(100 * rows, len(order), 100 * rows))
        groups = [group for pool in pools for group in _bucketed(pool, lengths, slots)]
        groups = [groups[i] for i in random_order(len(groups), 1)]
    else:
        groups = np.split(order, range(rows, len(order), rows))
    for pairs in groups:
        if tokens <= 0:
            return
        tokens -= int(lengths[pairs, 1].sum())
        shape = Shape(len(pairs), *lengths[pairs].max(axis=0).tolist())
        first = np.zeros((len(pairs), 2), np.int32)
        plan = Plan(shape, pairs, np.arange(len(pairs)), first, first[:, 0] + 1)
        yield make_batch(examples, plan, packed=False, start_id=config.model.start_id)


def _bucketed(pool: np.ndarray, lengths: np.ndarray, slots: int) -> Iterator[np.ndarray]:
    """Yields the pairs of a pool by length, as many at a time as fill the slots."""
    pool = pool[np.lexsort(lengths[pool].T)]  # by the target's length, then by the source's
    first = 0
    for last, length in enumerate(lengths[pool, 1].tolist()):
        if (last + 1 - first) * length > slots and last > first:
            yield pool[first:last]
            first = last
    yield pool[first:]
