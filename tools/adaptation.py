"""The study of adaptation: a model of captions continues on LibreOffice's help.

What is scored are both domains: what is gained on the new one, and what of the old one is lost.
"""

from collections.abc import Mapping
from typing import Any

import jax
from matplotlib.figure import Figure

from tools.scores import Data, Scored, texts, training
from transformer_jax.decoding.evaluation import score
from transformer_jax.decoding.translator import Translator
from transformer_jax.models.parameter_paths import split
from transformer_jax.runs.run import Run

LINES = 500
"""Number of lines of each domain that are translated."""


def both_domains(trained: Run, new: Data, old: Data) -> Scored:
    """Returns BLEU on the development sets of both domains, and what training took."""
    translator, values, outputs = Translator.load(trained.folder), {}, {}
    for name, data in (("old", old), ("new", new)):
        sources, references = data.sides(data.dev)
        outputs[name] = texts(translator, sources[:LINES])
        values[f"{name}_bleu"] = score(outputs[name], references[:LINES])["bleu"]
    trainable = split(trained.params(), trained.config.optimizer.frozen)[1]
    values["trained_parameters"] = sum(leaf.size for leaf in jax.tree.leaves(trainable))
    return values | training(trained), outputs


def picture(rows: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plots what each run has on the new domain over what it has on the old one."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes: Any = figure.subplots()
    for label, row in rows.items():
        point = row["old_bleu"], row["new_bleu"]
        axes.plot(*point, "o")
        axes.annotate(label.replace("_", " "), point, xytext=(6, 4), textcoords="offset points")
    axes.margins(0.15)  # for the labels
    axes.set(xlabel="BLEU on captions", ylabel="BLEU on LibreOffice's help")
    return figure
