"""The comparison of the kinds of attention trains, measures and draws what it says."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools import attention_kinds, gradient_noise
from transformer_jax.config import AttentionConfig, Config
from transformer_jax.decoding.strategies import Lines, make_search
from transformer_jax.models.transformer import Transformer
from transformer_jax.runs.run import Run
from transformer_jax.special_ids import PAD
from transformer_jax.text.corpus import Corpus
from transformer_jax.training import trainer as loop
from transformer_jax.training.setup import prepare

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def with_kind(config: Config, kind: str) -> Config:
    attention = AttentionConfig(kind=kind, layer=0)
    model = replace(config.model, attention_dropout=0.0, cross_attention=attention)
    return replace(config, model=model, train=replace(config.train, steps=4, evaluate_every=4))


@pytest.fixture(scope="module")
def runs(tiny_config: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("kinds")
    return {
        kind: attention_kinds.train(with_kind(tiny_config, kind), folder / kind)
        for kind in ("hard", "gumbel")
    }


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    yield


@pytest.mark.parametrize("label", attention_kinds.KINDS)
@pytest.mark.usefixtures("at_root")
def test_every_kind_is_trained_and_searched(label: str) -> None:
    config = attention_kinds.config_of(attention_kinds.KINDS[label], Path("data"))
    assert config.optimizer.decay_steps == config.train.steps == attention_kinds.STEPS
    model = Transformer(config.model, 400, 400)
    ids = jnp.ones((2, 5), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), attention_kinds.Batch(ids, ids, ids))
    found = jax.eval_shape(make_search([model], config.decode), [params["params"]], Lines(ids))
    assert found.ids.shape == (2, config.decode.n_best, 20)


def test_scores_are_those_of_the_finished_run(runs: dict[str, Run]) -> None:
    run = runs["hard"]
    pairs = list(Corpus(run.config.data.dev[0]).pairs())
    found = attention_kinds.measure(run, pairs)
    records = [json.loads(x) for x in (run.folder / "metrics.jsonl").read_text().splitlines()]
    (last,) = (r["sets"] for r in records if r["kind"] == "evaluation")
    assert found["validation_loss"] == last[run.config.data.dev[0]]["loss"]
    assert found["steps"] == 4
    assert {"bleu_cased_13a", "chrf", "signatures", "parameters", "minutes"} <= set(found)


def test_a_run_that_was_stopped_is_not_measured(
    runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs["hard"]
    monkeypatch.setattr(loop, "train", lambda *_, **__: run)
    longer = replace(run.config, train=replace(run.config.train, steps=5))
    with pytest.raises(SystemExit, match="is not finished; repeat the command to continue"):
        attention_kinds.train(longer, Path(run.folder))


def test_speed_is_of_all_kinds_on_the_same_batch(
    runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kinds, "SAMPLES", 1)
    run = runs["hard"]
    setup = prepare(run.config, run.tokenizers)
    batch = attention_kinds.fullest_batch(setup)
    first = next(setup.loader.batches()).batch
    assert np.count_nonzero(batch.target_out != PAD) >= np.count_nonzero(first.target_out != PAD)
    configs = {label: run.config for label, run in runs.items()}
    speeds = attention_kinds.speed(setup, configs, batch)
    assert set(speeds) == set(runs)
    assert min(speeds.values()) > 0


def test_a_baseline_makes_the_gradient_less_noisy(runs: dict[str, Run]) -> None:
    run = runs["hard"]
    batch = attention_kinds.fullest_batch(prepare(run.config, run.tokenizers))
    found = gradient_noise.compare(run, runs["gumbel"], batch, samples=16)
    assert -7 < found["baseline"] < 0
    assert found["hard"]["variance"] < 0.5 * found["hard, baseline 0"]["variance"]
    assert found["gumbel"]["variance"] > 0


def test_weights_are_drawn_for_each_kind(runs: dict[str, Run]) -> None:
    panels = attention_kinds.picture(runs, ("red old", "alt rot")).axes
    assert [panel.get_title() for panel in panels] == ["hard", "gumbel"]
    weights = np.asarray(panels[0].images[0].get_array())
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    assert np.isin(weights, (0.0, 0.5, 1.0)).all()  # of two heads, each of which picks one
