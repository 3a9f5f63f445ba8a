"""The study of attention kinds compares estimators, and draws what it says."""

from dataclasses import replace

import pytest

from tools import attention_kinds
from transformer_jax.config import AttentionConfig, Config
from transformer_jax.runs.run import Run
from transformer_jax.training.setup import prepare
from transformer_jax.training.trainer import train

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def runs(tiny_config: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("kinds")
    short = replace(tiny_config, train=replace(tiny_config.train, steps=4, evaluate_every=4))

    def trained(kind: str) -> Run:
        attention = AttentionConfig(kind=kind, layer=0)
        model = replace(short.model, attention_dropout=0.0, cross_attention=attention)
        return train(replace(short, model=model), folder / kind)

    return {kind: trained(kind) for kind in ("hard", "gumbel")}


def test_a_baseline_makes_the_gradient_less_noisy(runs: dict[str, Run]) -> None:
    batch = attention_kinds.fullest_batch(prepare(runs["hard"].config, runs["hard"].tokenizers))
    noise = attention_kinds.estimators(runs["hard"], batch, samples=16)
    assert -7 < noise["hard"]["baseline"] < 0
    assert noise["hard"]["variance"] < 0.5 * noise["hard, baseline 0"]["variance"]
    assert attention_kinds.estimators(runs["gumbel"], batch, 16)["gumbel"]["variance"] > 0
