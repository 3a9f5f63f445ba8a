"""Minimum Bayes risk decoding chooses by what samples have in common."""

from tools.minimum_risk import least_risk


def test_the_sample_nearest_to_all_is_chosen() -> None:
    samples = ["Ein Mann läuft.", "Ein Mann läuft schnell.", "Der Mann läuft schnell.", "Regen"]
    assert least_risk(samples) == "Ein Mann läuft schnell."


def test_a_sample_counts_as_often_as_it_is_drawn() -> None:
    assert least_risk(["Regen", "Ein Mann läuft.", "Ein Mann liest."]) != "Regen"
    assert least_risk(["Ein Mann läuft.", "Ein Mann liest.", *["Regen"] * 3]) == "Regen"
