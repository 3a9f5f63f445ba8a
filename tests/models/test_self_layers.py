"""Layers in the place of the decoder's self-attention: SSRU, and a running mean of one's own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from broken import Mean
from common import assert_learns, assert_steps_are_teacher_forcing, build, changed, flat, tiny

from transformer_jax.attention import Context, Mask
from transformer_jax.config import AttentionConfig, DecodeConfig
from transformer_jax.decoding.loop import Loop
from transformer_jax.decoding.scheduler import Job
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.search import Progress
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.models.make import check_model, check_packing, make_model
from transformer_jax.models.ssru import SSRU
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.runs import run
from transformer_jax.runs.run import Run
from transformer_jax.training.oracles import random_params

CONFIG = tiny(layers=2, self_layer=Mean.__name__)


LINES = [f"{'red ' * (i % 5)}{'blue new ' * (i % 4)}old" for i in range(24)]


@pytest.mark.parametrize(("layer", "name"), [(Mean.__name__, "out"), ("ssru", "candidate")])
def test_every_parameter_has_a_gradient(layer: str, name: str) -> None:
    config = replace(CONFIG, self_layer=layer)
    assert f"decoder/layers_1/self_attention/{name}/kernel" in flat(build(config)[1])
    assert_learns(config)


@pytest.mark.parametrize(("layer", "beams"), [(Mean.__name__, 1), (Mean.__name__, 4), ("ssru", 4)])
def test_steps_are_teacher_forcing(layer: str, beams: int) -> None:
    assert_steps_are_teacher_forcing(replace(CONFIG, self_layer=layer), beams, 1e-5)


def ssru_by_a_loop(x: np.ndarray, positions: np.ndarray, params: Any) -> np.ndarray:
    """The unit as its paper states it, in float64."""
    outputs, cell = np.zeros_like(x), np.zeros(x.shape[-1])
    for row, at in np.ndindex(*positions.shape):
        if positions[row, at] == 0:
            cell = np.zeros_like(cell)
        forget = params["forget"]["bias"] + x[row, at] @ params["forget"]["kernel"]
        forget = 1 / (1 + np.exp(-forget))
        cell = forget * cell + (1 - forget) * (x[row, at] @ params["candidate"]["kernel"])
        outputs[row, at] = np.maximum(cell, 0)
    return outputs


def test_ssru_and_its_gradient_are_those_of_a_loop() -> None:
    """The first row holds three sentences. The gradient of the loop is that of differences."""
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 0], [*range(8)]])
    draw, width = np.random.default_rng(0), 3
    x, direction = draw.normal(size=(2, *positions.shape, width))
    module = SSRU(tiny(d_model=width, heads=1, positions="none", bias=False))
    context = Context(Mask(), jnp.asarray(positions))
    shapes = jax.eval_shape(module.init, jax.random.key(0), x, context)["params"]
    params = jax.tree.map(lambda leaf: draw.normal(size=leaf.shape), shapes)

    def total(x: Any, params: Any) -> Any:
        output: Any = module.apply({"params": params}, x, context)
        return jnp.sum(output[0] * direction), output[0]

    arguments = jax.tree.map(jnp.float32, (x, params))
    gradient, output = jax.jit(jax.grad(total, (0, 1), has_aux=True))(*arguments)
    np.testing.assert_allclose(output, ssru_by_a_loop(x, positions, params), atol=1e-6)
    leaves = jax.tree.leaves((x, params))  # which are changed in place
    for leaf, computed in zip(leaves, jax.tree.leaves(gradient), strict=True):
        for index in np.ndindex(*leaf.shape):
            value, sums = leaf[index], []
            for leaf[index] in (value + 1e-6, value - 1e-6):
                sums.append(np.sum(ssru_by_a_loop(x, positions, params) * direction))
            leaf[index] = value
            np.testing.assert_allclose(computed[index], (sums[0] - sums[1]) / 2e-6, atol=1e-5)


def test_a_beam_search_reorders_grows_and_regroups_its_state(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an ensemble, the log probabilities of long outputs are those of teacher forcing."""
    regrouped: list[int] = []
    resume = Loop._resume

    def resumed(loop: Loop, job: Job) -> Progress:
        regrouped.append(len({sentence.batch for sentence in job.sentences}))
        return resume(loop, job)

    monkeypatch.setattr(Loop, "_resume", resumed)
    model = {"self_layer": Mean.__name__, "attention_dropout": 0.0, "max_length": 64}
    config, tokenizers = changed(finished.config, model=model), finished.tokenizers
    params = random_params(make_model(config.model, *tokenizers.sizes))
    run.create_with(params, 1, Run(tmp_path / "mean", config, tokenizers, {}))
    decode = DecodeConfig(beam=4, n_best=4, min_length=50, max_ratio=9.0, batch_tokens=256)
    mesh = make_mesh(devices=jax.devices()[:1])
    translator = Translator.load(tmp_path / "mean", tmp_path / "mean", decode=decode, mesh=mesh)
    translations = translator(LINES)
    scorer = Scorer(translator)
    for line, translation in zip(LINES, translations, strict=True):
        hypotheses = translation.hypotheses
        pairs = [(translator.encode(line, 1), hypothesis.ids) for hypothesis in hypotheses]
        for hypothesis, score in zip(hypotheses, scorer.of_ids(pairs), strict=True):
            np.testing.assert_allclose(hypothesis.log_prob, score.log_prob, rtol=1e-5)
    assert max(len(t.hypotheses[0].ids) for t in translations) > 40  # 32 positions at first
    assert max(regrouped) > 1


def test_what_it_does_not_support_is_refused() -> None:
    with pytest.raises(UserError, match=r"self_layer='Meen': unknown; did you mean Mean\?"):
        check_model(replace(CONFIG, self_layer="Meen"))
    dot = AttentionConfig(score="dot")
    refused = {"positions": "rotary", "attention_dropout": 0.1, "decoder_attention": dot}
    for field, value in refused.items():
        with pytest.raises(UserError, match=rf"model\.{field}=.*must be .*self_layer='Mean'"):
            check_model(replace(CONFIG, **{field: value}))
    with pytest.raises(UserError, match=r"data\.packing=True: .* model\.self_layer='Mean'"):
        check_packing(CONFIG)
