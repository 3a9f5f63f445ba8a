"""The study of seeds."""

from tools import seeds


def test_means_and_deviations_over_seeds() -> None:
    values = [dict.fromkeys(seeds.SCORES, score) for score in (40.0, 41.0, 42.0)]
    found = seeds.summary(values)
    assert (found["mean_cased_13a"], found["deviation_cased_13a"]) == (41.0, 1.0)
    assert found["mean_lower_tokenized"] == 41.0
