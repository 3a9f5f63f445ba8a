"""Scores a model on corpora: loss, perplexity and the scores of its translations."""

import contextlib
import math
import reprlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_jax.config import Config, DecodeConfig
from transformer_jax.data.buckets import Lengths
from transformer_jax.data.dataset import Examples
from transformer_jax.data.loader import evaluation_batches
from transformer_jax.decoding.evaluation import bleu_metric, score
from transformer_jax.decoding.loop import Cancelled
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError, printable
from transformer_jax.parallel import processes
from transformer_jax.parallel.mesh import local_shard, shard_batch
from transformer_jax.text.corpus import Corpus
from transformer_jax.training.setup import DevSet, Setup, load_dev_set
from transformer_jax.training.step import eval_step, loss_fn
from transformer_jax.types import Params

SAMPLES = 3
"""Number of translations of each corpus that are shown."""

LIMITS = ("max_length", "max_ratio", "min_length", "min_ratio", "no_repeat_ngrams", "suppress")
"""Fields of `decode` that also hold for the greedy translations of training."""

Metric = Callable[[Sequence[str], Sequence[str], Sequence[str]], float]
"""A metric of the user's own: (sources, outputs, references) -> a number, higher is better."""

SCORES = ("bleu", "chrf", "loss")
"""The scores that select the best checkpoint without a metric of the user's own."""


def select_metric(config: Config, metric: Metric | None) -> Config:
    """Returns the config whose best checkpoint is selected by `metric`, if there is one.

    UserError: its name is that of another score, or the config needs a metric that is not given.
    """
    best = config.train.best
    if metric is None:
        want = f"one of {', '.join(SCORES)}; a metric of your own needs --metric MODULE:{best}"
        config.train.require(best in SCORES, "best", want)
        return config
    if (name := metric_name(metric)) in (*SCORES, "perplexity"):
        raise UserError(f"--metric {name}: is the name of another score; rename the function")
    return config.changed(train={"best": name})


def check_metric(metric: Metric, dev: Iterable[DevSet]) -> None:
    """Calls a metric with some references as translations. UserError: it returns no finite number,
    or there is no corpus."""
    part = next(iter(dev), None)
    if part is None:
        raise UserError(f"--metric {metric_name(metric)}: needs a development corpus (data.dev)")
    sources, references = part.sources[:SAMPLES], part.references[:SAMPLES]
    measure(metric, sources, references, references)


def measure(
    metric: Metric, sources: Sequence[str], outputs: Sequence[str], references: Sequence[str]
) -> float:
    """Returns the value of a metric, which the coordinator alone computes, in all processes.

    UserError: it is not a finite number.
    """
    with processes.share_errors():
        value: Any = metric(sources, outputs, references) if processes.is_coordinator() else 0.0
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if math.isfinite(number := float(value)):
                return processes.broadcast(number)
        name, shown = metric_name(metric), printable(reprlib.repr(value))
        raise UserError(f"--metric {name}: returns {shown}: must return a finite number")


def metric_name(metric: Metric) -> str:
    """Returns the name of a metric, under which its values are reported."""
    return getattr(metric, "__name__", type(metric).__name__)


class DevScores:
    """Scores the development corpora of training, by loss and by greedy translation.

    cancelled: is called now and then; once it returns True, scoring is given up. metric: scores the
    translations, too.
    """

    def __init__(
        self, setup: Setup, cancelled: Callable[[], bool], metric: Metric | None = None
    ) -> None:
        self._setup, self._cancelled, self._metric = setup, cancelled, metric
        self._losses = setup.compile(partial(eval_step, loss=loss_fn(setup.model)))
        limits = {name: getattr(setup.config.decode, name) for name in LIMITS}
        greedy = replace(setup.config, decode=DecodeConfig(beam=1, **limits))
        self.translator = Translator(greedy, setup.tokenizers, {}, setup.mesh, cancelled=cancelled)

    def loss(self, params: Params, examples: Examples) -> dict[str, float]:
        """Returns loss and perplexity, without label smoothing. Cancelled: scoring is given up."""
        config, mesh = self._setup.config, self._setup.mesh
        # The shapes of batches are chosen for all corpora together.
        lengths = reduce(Lengths.joined, (dev.examples.lengths for dev in self._setup.dev.values()))

        def sums() -> Iterator[Any]:
            for batch in evaluation_batches(examples, config, local_shard(mesh), lengths):
                if self._cancelled():
                    raise Cancelled
                yield jax.block_until_ready(self._losses(params, shard_batch(batch, mesh)))

        return corpus_loss(sums())

    def __call__(
        self, params: Params, decode: bool = True
    ) -> tuple[dict[str, dict[str, float]], list[Any]] | None:
        """Returns scores by corpus, and sample translations; None: scoring was given up.

        decode: whether to translate; otherwise the scores are loss and perplexity.
        """
        translator, options = self.translator.with_params(params), self._setup.config.train
        scores: dict[str, dict[str, float]] = {}
        samples: list[Any] = []
        try:
            for name, dev in self._setup.dev.items():
                scores[name] = self.loss(params, dev.examples)
                if not decode:
                    continue
                sources, references = (side[: options.dev_lines] for side in dev[1:])
                outputs = translator(sources)
                scored = score(outputs, [references], tokenize=options.tokenize)
                scores[name] |= {metric: scored[metric] for metric in ("bleu", "chrf")}
                if metric := self._metric:
                    value = measure(metric, sources, outputs, references)
                    scores[name][metric_name(metric)] = value
                samples += list(zip(sources, outputs, references, strict=True))[:SAMPLES]
        except Cancelled:
            return None
        return scores, samples[:SAMPLES]


class Evaluation(NamedTuple):
    """Translations of a corpus with one search, and their scores."""

    corpus: str
    search: DecodeConfig
    dev: DevSet
    outputs: Sequence[str]
    references: Sequence[Sequence[str]]
    scores: dict[str, Any]
    """Those of `evaluation.score`, sentences per second without compilation, loss, perplexity."""


def evaluate(
    translator: Translator,
    corpora: Sequence[str],
    language: str | None = None,
    searches: Sequence[DecodeConfig] = (),
    others: Sequence[Sequence[str]] = (),
    done: Callable[[int], None] = lambda count: None,
) -> Iterator[Evaluation]:
    """Translates and scores corpora, and yields the evaluation of each with each search.

    language: the target language; adds the BLEU of lower-cased, tokenized text. searches: instead
    of the translator's own. others: further references of each pair. done: as in
    `Translator.translate`. UserError: a corpus cannot be read, the language is unknown, or a
    package of BLEU's tokenizer is missing.
    """
    config = translator.config
    tokenize = config.train.tokenize
    bleu_metric(tokenize)
    every: dict[str, DevSet] = {}
    for name in corpora:
        corpus = Corpus(name, "validation", config.data.fields)
        # Else one process would wait for another's cache.
        processes.require_same_everywhere(config, {name: corpus.digest})
        every[name] = load_dev_set(corpus, translator.tokenizers, config)
    scorer = Scorer(translator)
    for name, dev in every.items():
        references = [dev.references, *others]
        rows = map(dev.examples.pair, range(len(dev.examples)))
        ids = [(source.tolist(), target.tolist()) for source, target in rows]
        loss = corpus_loss((-pair.log_prob, len(pair.ids)) for pair in scorer.of_ids(ids))
        for search in searches or [config.decode]:
            searcher = translator.with_search(search)
            began, compiling = time.perf_counter(), searcher.compiling
            outputs = list(searcher.stream(dev.sources, done=done))
            seconds = time.perf_counter() - began - (searcher.compiling - compiling)
            speed = {"sentences_per_s": len(outputs) / seconds}
            scores = score(outputs, references, language, tokenize) | speed | loss
            yield Evaluation(name, search, dev, outputs, references, scores)


def corpus_loss(sums: Iterable[tuple[Any, Any]]) -> dict[str, float]:
    """Returns the loss in nats per token and the perplexity, from the batches' sums and counts."""
    total, count = np.sum(np.array(list(sums), np.float64).reshape(-1, 2), axis=0)
    loss = float(total / max(count, 1))
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
