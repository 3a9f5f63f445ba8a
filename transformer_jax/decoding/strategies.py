"""Chooses the search, the length penalty and the logits processors that a config asks for."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from transformer_jax.config import DecodeConfig
from transformer_jax.decoding import beam, ensemble, processors, search
from transformer_jax.decoding.processors import LengthPenalty, Processor, Sentences
from transformer_jax.models.parameter_paths import map_with_paths, vocabulary_side
from transformer_jax.models.quantization import dequantize
from transformer_jax.models.transformer import Model
from transformer_jax.special_ids import BOS, EOS, PAD
from transformer_jax.types import HostOrDeviceArray, Params, Size

LENGTH_PENALTIES: dict[str, Callable[[float], LengthPenalty]] = {
    "gnmt": processors.gnmt,
    "power": processors.power,
    "reward": processors.reward,
    "none": lambda _: processors.unnormalized,
}
"""Length penalties by their name in the config, as functions of `decode.alpha`."""


class Lines(NamedTuple):
    """A batch of lines to translate, as ids."""

    source: HostOrDeviceArray  # [B, S] int32
    numbers: HostOrDeviceArray | None = None  # [B] int32, which seed the samples of each line
    prefix: HostOrDeviceArray | None = None  # [B, P] int32, with which outputs begin; then `PAD`
    phrases: HostOrDeviceArray | None = None  # [B, P, L] int32, which outputs hold; then `PAD`
    candidates: HostOrDeviceArray | None = None  # [C] int32, of which outputs consist; None: all
    allowed: HostOrDeviceArray | None = None  # [B, C] bool, those of each line

    # With candidates, the ids of prefixes, phrases and outputs are indices of these. Special ids
    # are their own indices.


def choose_strategy(config: DecodeConfig, *, phrases: bool = False) -> search.Strategy:
    """Returns the search that `config` asks for, of outputs that hold `phrases` or of any."""
    if config.sample:
        return search.sample(config.n_best)
    if config.beam == 1 and not phrases:
        return search.greedy()
    count = config.n_best if config.lookahead else config.beam
    early = config.early_stopping
    stop = beam.early_stopping(config.beam) if early else beam.optimal_stopping(count)
    constraints = beam.PHRASES if phrases else beam.UNCONSTRAINED
    return beam.beam_search(config.beam, stop, constraints, lookahead=config.lookahead)


def choose_processors(config: DecodeConfig, suppressed: Sequence[int] = ()) -> list[Processor]:
    """Returns the logits processors that `config` asks for, in the order of their application.

    suppressed: ids of the pieces `decode.suppress`.
    """
    chosen: list[Processor] = [partial(processors.suppress, ids=(PAD, *suppressed))]
    if config.no_repeat_ngrams is not None:
        chosen.append(partial(processors.no_repeat_ngrams, size=config.no_repeat_ngrams))
    if config.repetition_penalty != 1:
        chosen.append(partial(processors.repetition_penalty, factor=config.repetition_penalty))
    if config.min_length > 0 or config.min_ratio > 0:
        chosen.append(partial(processors.at_least_min_length, end_id=EOS))
    if config.temperature != 1:
        chosen.append(partial(processors.temperature, value=config.temperature))
    if config.top_k is not None:
        chosen.append(partial(processors.top_k, count=config.top_k))
    if config.top_p is not None:
        chosen.append(partial(processors.top_p, mass=config.top_p))
    return chosen


class Phases(NamedTuple):
    """A search in parts, so that it can go on in larger arrays, or with other sentences.

    All are pure functions.
    """

    prefill: Callable[[Sequence[Params], Lines], search.Progress]
    """(parameters of each model, lines) -> the search before its first position."""
    decode: Callable[
        [Sequence[Params], search.Progress, HostOrDeviceArray],
        tuple[search.Progress, Array, search.Hypotheses],
    ]
    """(parameters, search, leave_at) -> the search when `extend_until` leaves it; which sentences
    are done; and the `decode.n_best` best hypotheses of each."""
    grow: Callable[[search.Progress], search.Progress]
    """Doubles the arrays."""


FIRST_LENGTH = 32
"""Number of positions of the arrays of a search at first, at least those of the source."""


def capacity(progress: search.Progress) -> Size:
    """Returns the number of positions of the arrays of a search."""
    return progress.beam.live.ids.shape[2]


def make_phases(
    models: Sequence[Model],
    config: DecodeConfig,
    suppressed: Sequence[int] = (),
    *,
    first_length: int | None = FIRST_LENGTH,
) -> Phases:
    """Returns the search that `config` asks for, in parts.

    suppressed: ids that no output may hold. first_length: None: the greatest length of all outputs.
    """
    chosen = choose_processors(config, suppressed)
    penalty = LENGTH_PENALTIES[config.penalty](config.alpha)

    # The phases are compiled apart, so that each one makes the strategy and the rules anew from its
    # arguments. The greatest length is the size of their arrays, which doubles when they grow.
    def search_of(sentences: Sentences, length: Size) -> tuple[search.Strategy, search.Rules]:
        strategy = choose_strategy(config, phrases=sentences.phrases is not None)
        # Last, since a forced id may be one that other processors forbid.
        last = [] if sentences.prefix is None else [processors.forced_prefix]
        return strategy, search.Rules(length, BOS, EOS, penalty, [*chosen, *last])

    def prefill(params: Sequence[Params], lines: Lines) -> search.Progress:
        source = jnp.asarray(lines.source)
        sentences = _sentences(models, config, lines)
        length = greatest_length(models, config, source.shape[1])
        if first_length is not None:
            length = min(max(first_length, source.shape[1]), length)
        strategy, rules = search_of(sentences, length)
        params = list(map(dequantize, params))
        state = ensemble.prefill(models, params, source, strategy.beams, length)
        return search.begin(strategy, state, sentences, rules)

    def decode(
        params: Sequence[Params], progress: search.Progress, leave_at: HostOrDeviceArray
    ) -> tuple[search.Progress, Array, search.Hypotheses]:
        strategy, rules = search_of(progress.sentences, capacity(progress))
        step = _step(models, list(map(dequantize, params)), progress.sentences)
        progress = search.extend_until(strategy, step, progress, rules, jnp.asarray(leave_at))
        hypotheses = strategy.hypotheses(progress.beam, rules)
        best = search.Hypotheses(*(x[:, : config.n_best] for x in hypotheses))
        return progress, progress.done, best

    def grow(progress: search.Progress) -> search.Progress:
        length = 2 * capacity(progress)
        state = ensemble.grow_state(models, progress.state, length)
        return progress._replace(beam=search.pad_ids(progress.beam, length), state=state)

    return Phases(prefill, decode, grow)


def _step(models: Sequence[Model], params: Sequence[Params], sentences: Sentences) -> search.Step:
    """Returns the step of the models; that among candidates is the step of smaller models."""
    candidates, allowed = sentences.candidates, sentences.allowed
    if candidates is None or allowed is None:
        return ensemble.make_step(models, params)
    sizes = dict.fromkeys(("source_vocabulary", "target_vocabulary"), candidates.shape[0])

    def take(path: str, leaf: Array) -> Array:
        return leaf[candidates] if vocabulary_side(path) == "target" else leaf

    rows = partial(map_with_paths, take)
    step = ensemble.make_step([model.clone(**sizes) for model in models], [*map(rows, params)])

    def among_candidates(ids: Array, state: Any, index: Array) -> Any:
        logits, state, auxiliary = step(ids, state, index)
        return jnp.where(allowed[:, None], logits, -jnp.inf), state, auxiliary

    return among_candidates


def make_search(
    models: Sequence[Model], config: DecodeConfig, suppressed: Sequence[int] = ()
) -> Callable[[Sequence[Params], Lines], search.Hypotheses]:
    """Returns a pure function (parameters of each model, lines) -> the `decode.n_best` best
    hypotheses of each line: the search as a whole, in arrays of the greatest length."""
    phases = make_phases(models, config, suppressed, first_length=None)

    def run(params: Sequence[Params], lines: Lines) -> search.Hypotheses:
        return phases.decode(params, phases.prefill(params, lines), np.array(0, np.int32))[-1]

    return run


def _sentences(models: Sequence[Model], config: DecodeConfig, lines: Lines) -> Sentences:
    """Returns the limits, the prefix and the rng of each line; a blank line has no output."""
    lines = jax.tree.map(jnp.asarray, lines)
    tokens = jnp.sum(lines.source != PAD, axis=1)
    greatest = greatest_length(models, config, tokens)
    # The source's end symbol is not one of its tokens.
    least = jnp.ceil((tokens - 1) * jnp.asarray(config.min_ratio, jnp.float32)).astype(jnp.int32)
    keys = None
    if config.sample:
        assert lines.numbers is not None
        root = jax.random.key(config.seed)
        folded = jax.vmap(lambda number: jax.random.fold_in(root, number))(lines.numbers)
        keys = jax.random.key_data(folded)
    return Sentences(
        max_length=jnp.where(tokens > 0, greatest, 0),
        min_length=jnp.minimum(jnp.maximum(least, config.min_length), greatest - 1),
        prefix=lines.prefix,
        keys=keys,
        phrases=lines.phrases,
        candidates=lines.candidates,
        allowed=lines.allowed,
    )


def greatest_length(models: Sequence[Model], config: DecodeConfig, tokens: Size | Array) -> Any:
    """Returns the greatest length of the output for a source of `tokens`, end symbols included.

    It is `decode.max_ratio` · tokens + 10, but at most `decode.max_length` and `model.max_length`;
    for a classifier also at most its labels.
    """
    most = min(min(model.config.max_length, model.config.max_targets) for model in models)
    most = min(config.max_length or most, most)
    ratio = min(config.max_ratio, most)  # which is as good, and keeps products small
    ratio = Fraction(ratio).limit_denominator(1000)  # a symbolic size has no fractions
    length = tokens * ratio.numerator // ratio.denominator + 10
    if isinstance(tokens, jax.Array):
        return jnp.minimum(length, most)
    return min(length, most) if isinstance(length, int) else jax.core.min_dim(length, most)
