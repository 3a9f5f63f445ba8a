"""A layer of one's own in the place of the decoder's self-attention: a running mean."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from broken import Mean
from common import assert_learns, assert_steps_are_teacher_forcing, build, flat, tiny

from transformer_jax.config import AttentionConfig, Config, DecodeConfig
from transformer_jax.decoding.loop import Loop
from transformer_jax.decoding.scheduler import Job
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.search import Progress
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.models.make import check_model, check_packing
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.runs.run import Run
from transformer_jax.training.trainer import train

CONFIG = tiny(layers=2, self_layer=Mean.__name__)


LINES = [f"{'red ' * (i % 5)}{'blue new ' * (i % 4)}old" for i in range(24)]


def test_every_parameter_has_a_gradient() -> None:
    assert "decoder/layers_1/self_attention/out/kernel" in flat(build(CONFIG)[1])
    assert_learns(CONFIG)


@pytest.mark.parametrize("beams", [1, 4])
def test_steps_are_teacher_forcing(beams: int) -> None:
    assert_steps_are_teacher_forcing(CONFIG, beams, 1e-5)


@pytest.fixture(scope="module")
def trained(tiny_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    model = replace(
        tiny_config.model, self_layer=Mean.__name__, attention_dropout=0.0, max_length=64
    )
    config = replace(tiny_config, model=model)
    return train(config, tmp_path_factory.mktemp("runs") / "mean")


def test_a_beam_search_reorders_grows_and_regroups_its_state(
    trained: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an ensemble, the log probabilities of long outputs are those of teacher forcing."""
    regrouped: list[int] = []
    resume = Loop._resume

    def resumed(loop: Loop, job: Job) -> Progress:
        regrouped.append(len({sentence.batch for sentence in job.sentences}))
        return resume(loop, job)

    monkeypatch.setattr(Loop, "_resume", resumed)
    decode = DecodeConfig(beam=4, n_best=4, min_length=50, max_ratio=9.0, batch_tokens=256)
    mesh = make_mesh(devices=jax.devices()[:1])
    translator = Translator.load(trained.folder, trained.folder, decode=decode, mesh=mesh)
    translations = translator(LINES)
    scorer = Scorer.like(translator)
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
    refused = {
        "positions": "rotary",
        "attention_dropout": 0.1,
        "decoder_attention": AttentionConfig(score="dot"),
    }
    for field, value in refused.items():
        with pytest.raises(UserError, match=rf"model\.{field}=.*must be .*self_layer='Mean'"):
            check_model(replace(CONFIG, **{field: value}))
    with pytest.raises(UserError, match=r"data\.packing=True: .* model\.self_layer='Mean'"):
        check_packing(CONFIG)
