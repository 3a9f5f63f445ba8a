"""The study of changes to the recipe."""

import math
from pathlib import Path

import pytest

from tools import ablations
from tools.multi30k import recipe, shortened
from transformer_jax.config import differences


def rows(**scores: tuple[float, float]) -> dict[str, dict[str, float]]:
    """Rows in which all changes but those named score 38 with one seed and 39 with the other."""
    found = {}
    for name in ablations.CHANGES:
        for seed, score in zip(ablations.SEEDS, scores.get(name, (38.0, 39.0)), strict=True):
            values = dict.fromkeys((ablations.SCORE, "bleu_cased_13a", "minutes"), score)
            found[f"{name}_{seed}"] = values
    return found


def test_only_differences_of_two_standard_deviations_are_called_differences() -> None:
    # Each pair of seeds has a standard deviation of √½, and so has a difference of two means.
    changed = {"shallow_decoder": (36.0, 37.0), "r_drop": (39.0, 40.0), "bpe_dropout": (41.0, 42.0)}
    found = ablations.summarize(rows(**changed))
    assert found["deviation_of_a_seed"] == pytest.approx(math.sqrt(0.5))
    verdicts = {name: values["verdict"] for name, values in found["changes"].items()}
    assert verdicts.pop("shallow_decoder") == "worse"
    assert verdicts.pop("bpe_dropout") == "better"
    assert set(verdicts.values()) == {"none"}
    assert found["changes"]["r_drop"]["difference"] == pytest.approx(1.0)


def test_each_config_differs_from_the_shortened_recipe_in_what_its_name_says() -> None:
    fields = {
        "recipe": [],
        "r_drop": ["data.batch_tokens", "optimizer.r_drop"],
        "bpe_dropout": ["tokenizer.sampling"],
        "adam": ["optimizer.kind"],
        "attention_of_the_paper": ["model.kv_heads", "model.positions"],
        "no_averaging": ["optimizer.ema"],
        "shallow_decoder": ["model.decoder_layers"],
    }
    data = Path("data")
    for name, config in ablations.configs(data).items():
        change, _, seed = name.rpartition("_")
        base = shortened(recipe(data, seed=int(seed)), 3)
        changed = [text.partition(":")[0] for text in differences(base, config)]
        assert sorted(changed) == fields[change], name
