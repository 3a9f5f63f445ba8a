"""Scores a model on corpora: loss, perplexity and the scores of its translations."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.config import Config, DecodeConfig
from transformer_jax.data.buckets import Lengths
from transformer_jax.data.dataset import Examples
from transformer_jax.data.loader import evaluation_batches
from transformer_jax.decoding.evaluation import bleu_metric, score, warn_of_unspaced
from transformer_jax.decoding.loop import Cancelled
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.translator import Translator
from transformer_jax.models.quantization import dequantize
from transformer_jax.models.transformer import Model
from transformer_jax.parallel.compile import compile_step
from transformer_jax.parallel.mesh import local_shard, shard_batch
from transformer_jax.parallel.processes import require_same_everywhere
from transformer_jax.text.corpus import Corpus
from transformer_jax.training.setup import DevSet, Setup, load_dev_set
from transformer_jax.training.step import eval_step, loss_fn
from transformer_jax.types import Batch, Params

SAMPLES = 3
"""Number of translations of each corpus that are shown."""


def dev_loss_fn(
    model: Model,
    config: Config,
    mesh: Mesh,
    dev: Iterable[DevSet],
    executor: str = "jit",
    cancelled: Callable[[], bool] = lambda: False,
) -> Callable[[Params, Examples], dict[str, float]]:
    """Returns a function (params, examples) -> loss and perplexity, without label smoothing.

    dev: all that will be scored, for which the shapes of batches are chosen together. cancelled: is
    called before each batch; if it returns True, the function raises Cancelled.
    """
    loss, shard = loss_fn(model), local_shard(mesh)
    each = [part.examples.lengths for part in dev]
    lengths = functools.reduce(Lengths.joined, each) if each else None

    def step(params: Params, batch: Batch, **options: Any) -> Any:
        return eval_step(dequantize(params), batch, loss=loss, **options)

    deterministic = config.execution.deterministic
    losses = compile_step(step, mesh, executor=executor, deterministic=deterministic)

    def sums(params: Params, examples: Examples) -> Iterator[Any]:
        for batch in evaluation_batches(examples, config, shard, lengths):
            if cancelled():
                raise Cancelled
            yield jax.block_until_ready(losses(params, shard_batch(batch, mesh)))

    return lambda params, examples: corpus_loss(sums(params, examples))


class DevScores:
    """Scores the development corpora of training, by loss and by greedy translation.

    cancelled: is called now and then; once it returns True, scoring is given up.
    """

    def __init__(self, setup: Setup, cancelled: Callable[[], bool]) -> None:
        config, self._dev = setup.config, setup.dev
        self._tokenize = config.train.tokenize
        executor = config.execution.executor
        dev = self._dev.values()
        self.loss = dev_loss_fn(setup.model, config, setup.mesh, dev, executor, cancelled)
        greedy = dataclasses.replace(config, decode=DecodeConfig(beam=1))
        self.translator = Translator(greedy, setup.tokenizers, {}, setup.mesh, cancelled=cancelled)

    def __call__(self, params: Params) -> tuple[dict[str, dict[str, float]], list[Any]] | None:
        """Returns scores by corpus, and sample translations; None: scoring was given up."""
        translator = self.translator.with_params(params)
        scores: dict[str, dict[str, float]] = {}
        samples: list[Any] = []
        try:
            for name, dev in self._dev.items():
                losses = self.loss(params, dev.examples)
                outputs = translator(dev.sources)
                bleu = score(outputs, [dev.references], tokenize=self._tokenize)["bleu"]
                scores[name] = losses | {"bleu": bleu}
                samples += list(zip(dev.sources, outputs, dev.references, strict=True))[:SAMPLES]
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
        require_same_everywhere(config, {name: corpus.digest})  # else one waits for another's cache
        every[name] = load_dev_set(corpus, translator.tokenizers, config)
        warn_of_unspaced(name, every[name].references, tokenize)
    scorer = Scorer.like(translator)
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
