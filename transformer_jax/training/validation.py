"""Scores a model on corpora: loss, perplexity and the scores of its translations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from transformer_jax.config import Config, DecodeConfig
from transformer_jax.data import loader as data
from transformer_jax.data.dataset import Examples, Report, tokenize
from transformer_jax.decoding.evaluation import score
from transformer_jax.decoding.translator import Translator
from transformer_jax.models.quantization import dequantize
from transformer_jax.models.transformer import Model
from transformer_jax.parallel.compile import compile_step
from transformer_jax.parallel.mesh import data_parallel_size, local_rows, shard_batch
from transformer_jax.parallel.processes import require_same_everywhere, this_process
from transformer_jax.text.corpus import Corpus
from transformer_jax.training.setup import loss_fn
from transformer_jax.training.step import eval_step
from transformer_jax.types import Batch, Params


def dev_loss_fn(
    model: Model,
    config: Config,
    mesh: Mesh,
    executor: str = "jit",
    checked: Callable[[Any], Any] = lambda function: function,
) -> Callable[[Params, Examples], dict[str, float]]:
    """Returns a function (params, examples) -> loss and perplexity, without label smoothing.

    checked: wraps the compiled function of (params, batch) that it calls.
    """
    loss = loss_fn(model, 0.0)

    def step(params: Params, batch: Batch, **options: Any) -> Any:
        return eval_step(dequantize(params), batch, loss=loss, **options)

    deterministic = config.execution.deterministic
    losses = checked(compile_step(step, mesh, executor, deterministic=deterministic))

    def dev_loss(params: Params, examples: Examples) -> dict[str, float]:
        batches = data.evaluation_batches(
            examples,
            config.data,
            decoder_start_id=config.model.decoder_start_id,
            devices=data_parallel_size(mesh),
            parts=local_rows(mesh),
        )
        return corpus_loss(losses(params, shard_batch(batch, mesh)) for batch in batches)

    return dev_loss


class Evaluation(NamedTuple):
    """Translations of a corpus with one search, and their scores."""

    corpus: str
    search: DecodeConfig
    sources: Sequence[str]
    references: Sequence[str]
    outputs: Sequence[str]
    scores: dict[str, Any]  # those of `evaluation.score`, sentences per second, loss, perplexity
    report: Report  # the number of pairs that the loss leaves out


def evaluate(
    translator: Translator,
    corpora: Sequence[str],
    language: str | None = None,
    searches: Sequence[DecodeConfig] = (),
) -> Iterator[Evaluation]:
    """Translates and scores corpora, and yields the evaluation of each with each search.

    language: the target language; adds the BLEU of lower-cased, tokenized text. searches: instead
    of the translator's own. UserError: a corpus cannot be read, or the language is unknown.
    """
    config = translator.config
    dev_loss = dev_loss_fn(translator.model, config, translator.mesh)
    for name in corpora:
        corpus = Corpus(name, "validation", config.data.fields)
        pairs = list(corpus.pairs())
        require_same_everywhere(config, {name: corpus.digest})
        sources, references = map(list, zip(*pairs, strict=True))
        examples = tokenize(
            [corpus],
            translator.tokenizers,
            config.data,
            max_length=config.model.max_length,
            filters=False,
            pairs=pairs,
            process_index=this_process()[0],
        )
        loss = dev_loss(translator.params, examples)
        for search in searches or [config.decode]:
            began = time.perf_counter()
            outputs = translator.with_search(search)(sources)
            speed = {"sentences_per_s": len(sources) / (time.perf_counter() - began)}
            scores = score(outputs, references, language) | speed | loss
            yield Evaluation(name, search, sources, references, outputs, scores, examples.report)


def corpus_loss(sums: Iterable[tuple[Any, Any]]) -> dict[str, float]:
    """Returns the loss in nats per token and the perplexity, from the batches' sums and counts."""
    total, count = np.sum(np.array(list(sums), np.float64).reshape(-1, 2), axis=0)
    loss = float(total / max(count, 1))
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
