"""What is scored during training: how many lines, how often, and by which metric."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from common import changed
from training_process import of_kind

from transformer_jax.config import Config
from transformer_jax.decoding.evaluation import score
from transformer_jax.errors import UserError
from transformer_jax.runs import run
from transformer_jax.training.setup import prepare
from transformer_jax.training.trainer import train
from transformer_jax.training.validation import DevScores, measure, select_metric


def test_the_first_lines_are_translated_and_the_loss_is_of_all(
    tiny_config: Config, finished: run.Run
) -> None:
    params, (name,) = finished.params(), tiny_config.data.dev
    few = changed(tiny_config, train={"dev_lines": 5}, decode={"max_length": 6, "beam": 2})
    setup, seen = prepare(few), []

    def metric(*lines: Sequence[str]) -> float:
        seen.append(lines)
        return 0.5

    scores = DevScores(setup, lambda: False, metric)
    decode = scores.translator.config.decode
    assert (decode.max_length, decode.beam) == (6, 1)
    scored: Any = scores(params)
    ((sources, outputs, references),) = seen
    (dev,) = setup.dev.values()
    assert (sources, references) == (dev.sources[:5], dev.references[:5])
    wanted = score(outputs, [references])
    made = of_kind(finished, "evaluation")
    (best,) = [each for each in made if each["step"] == finished.best_step()]
    assert scored[0][name]["loss"] == pytest.approx(best["sets"][name]["loss"])
    assert scored[0][name]["chrf"] == wanted["chrf"] != best["sets"][name]["chrf"]
    assert scored[0][name]["metric"] == 0.5


@pytest.mark.slow
def test_evaluations_without_translation_count_for_neither_best_nor_patience(
    tiny_config: Config, tmp_path: Path
) -> None:
    """The metric falls, so that the first of the evaluations that translate is the best one, and
    training ends with the second after it."""
    every = {"evaluate_every": 2, "save_every": 2, "decode_every": 2, "patience": 2, "steps": 14}
    numbers = itertools.count()

    def falling(*_: Sequence[str]) -> int:
        return -next(numbers)

    trained = train(changed(tiny_config, train=every), tmp_path / "r", metric=falling)
    found = of_kind(trained, "evaluation")
    assert [record["step"] for record in found] == [2, 4, 6, 8, 10, 12]
    (name,) = tiny_config.data.dev
    for record, decoded in zip(found, [False, True] * 3, strict=True):
        assert ({"falling", "bleu", "chrf"} <= record["sets"][name].keys()) == decoded
        assert len(record["samples"]) == 3 * decoded
    assert [record["step"] for record in found if record["best"]] == [4]
    assert trained.best_step() == 4


@pytest.mark.slow
@pytest.mark.parametrize(("every", "decoded"), [(9, [False, True]), (None, [False, False])])
def test_the_last_evaluation_translates_and_by_loss_all_count(
    every: int | None, decoded: list[bool], tiny_config: Config, tmp_path: Path
) -> None:
    values = {"evaluate_every": 2, "decode_every": every, "steps": 4, "best": "loss"}
    found = of_kind(train(changed(tiny_config, train=values), tmp_path / "r"), "evaluation")
    (name,) = tiny_config.data.dev
    assert ["bleu" in record["sets"][name] for record in found] == decoded
    assert found[0]["best"]


@pytest.mark.parametrize("value", [float("nan"), None, "high", [1.0, 2.0]])
def test_a_metric_without_a_number_or_a_name_is_refused(value: Any, tiny_config: Config) -> None:
    def bleu(*_: Sequence[str]) -> Any:
        return value

    with pytest.raises(UserError, match=re.escape(f"--metric bleu: returns {value!r}: must")):
        measure(bleu, ["a"], ["b"], ["c"])
    with pytest.raises(UserError, match="--metric bleu: is the name of another score"):
        select_metric(tiny_config, bleu)
