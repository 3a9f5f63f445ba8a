"""The studies, as data: `make study NAME=ablations`, or python -m tools.studies ablations.

Each trains its runs, keeps what is in results/NAME.json already, and writes the rest to it. --only
names the runs to train now, and --data the folder of the corpora.
"""

import itertools
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure

from tools import adaptation, attention_kinds, distillation, scores
from tools.scores import Data
from tools.study import (
    RUNS,
    Changes,
    Rows,
    Study,
    changed,
    outputs_file,
    run_study,
    train_each,
    write_rows,
)
from transformer_jax import plot
from transformer_jax.allocator import restart_with_allocator
from transformer_jax.config import DecodeConfig
from transformer_jax.decoding.evaluation import compare
from transformer_jax.parallel.program_cache import cache_programs
from transformer_jax.runs.run import exists, load
from transformer_jax.text.files import read_lines

MULTI30K = Data("../shared/data/multi30k", "{folder}/{part}.en.gz,{folder}/{part}.{language}.gz")
LIBREOFFICE = Data(
    "../shared/data/libreoffice", "{folder}/{part}.en-de.tsv.gz", dev="dev", test="dev"
)
RECIPES = Data("", "{part}", train="recipes", dev="recipes", test="recipes:test")


def fields(section: str, **values: Any) -> Changes:
    """Returns the changes of some fields of a section of the config."""
    return {f"{section}.{name}": value for name, value in values.items()}


def steps(count: int) -> Changes:
    """Returns the changes for a run of `count` steps, over which the learning rate decays."""
    return {"train.steps": count, "optimizer.decay_steps": count}


SIXTH = steps(2133)
"""A sixth of the recipe's steps of Multi30k."""


def with_seeds(rows: Mapping[str, Changes], seeds: Sequence[int]) -> dict[str, Changes]:
    """Returns each row with each seed, as LABEL_SEED."""
    labels = itertools.product(seeds, rows)
    return {f"{label}_{seed}": {**rows[label], "train.seed": seed} for seed, label in labels}


# Multi30k: seeds, and the settings of a paper

SEEDS = (0, 1, 2)
TINY: Changes = {
    **fields("model", d_model=128, heads=4, kv_heads=None, d_ff=256, positions="sinusoidal"),
    "optimizer.kind": "adam",
    "train.log_every": 50,
}
PUBLISHED: Changes = {
    **TINY,
    **fields("optimizer", schedule="inverse_sqrt", warmup=2000, decay_steps=None, ema=None),
    **fields("train", steps=8000, save_every=80, keep=10),
    **fields("decode", penalty="gnmt", alpha=0.6),
    "model.norm": "post",
    "tokenizer.vocabulary": 10_000,
    "data.batch_tokens": 8192,
}
"""The settings of the Transformer-tiny of Wu et al. 2021, the best published system of this size.
The mean of its last ten checkpoints is evaluated. An epoch has 63 steps. Other than there, the text
is cased, and the 10,000 BPE ids are SentencePiece's."""
SCORES = ("bleu_lower_tokenized", "bleu_cased_13a", "chrf", "val_bleu", "minutes")


def over_seeds(rows: Rows) -> dict[str, Any]:
    """Returns the mean and the standard deviation of each score over the seeds."""
    values = {name.removeprefix("bleu_"): [row[name] for row in rows.values()] for name in SCORES}
    means = {f"mean_{name}": statistics.mean(each) for name, each in values.items()}
    deviations = {f"deviation_{name}": statistics.stdev(each) for name, each in values.items()}
    return {"seeds": SEEDS, **means, **deviations}


# Ablations

TWO_SEEDS = (0, 1)
CHANGES: dict[str, Changes] = {
    "recipe": {},
    # R-Drop computes each pair twice: it has half of the pairs.
    "r_drop": {"optimizer.r_drop": 3.0, "data.batch_tokens": 2048},
    "bpe_dropout": {"tokenizer.sampling": 0.1},
    "adam": {"optimizer.kind": "adam"},
    "attention_of_the_paper": {"model.positions": "sinusoidal", "model.kv_heads": None},
    "no_averaging": {"optimizer.ema": None},
    "shallow_decoder": {"model.decoder_layers": 1},
}


def compare_changes(names: Sequence[str], rows: Rows, _: Data) -> dict[str, Any]:
    """Returns the mean of each change, and how it differs from the first one.

    The score on the development set decides. The standard deviation of a seed is pooled over all
    changes; that of a difference of two means of n seeds is √(2 / n) of it. A difference below two
    of those is called none.
    """

    def values(name: str, field: str) -> list[float]:
        return [rows[f"{name}_{seed}"][field] for seed in TWO_SEEDS]

    variances = [statistics.variance(values(name, "val_bleu")) for name in names]
    deviation = math.sqrt(statistics.mean(variances))
    of_difference = math.sqrt(2 / len(TWO_SEEDS)) * deviation
    changes = {}
    for name in names:
        mean = statistics.mean(values(name, "val_bleu"))
        difference = mean - statistics.mean(values(names[0], "val_bleu"))
        verdict = "better" if difference > 0 else "worse"
        changes[name] = {
            "mean_val_bleu": mean,
            "difference": difference,
            "verdict": "none" if abs(difference) < 2 * of_difference else verdict,
            "mean_cased_13a": statistics.mean(values(name, "bleu_cased_13a")),
            "minutes": statistics.mean(values(name, "minutes")),
            "mean_loss": statistics.mean(best_loss(rows[f"{name}_{seed}"]) for seed in TWO_SEEDS),
        }
    return {"seeds": TWO_SEEDS, "deviation_of_a_seed": deviation, "changes": changes}


def best_loss(row: Mapping[str, Any]) -> float:
    """Returns the loss on the development set of the checkpoint that was evaluated."""
    return next(each["loss"] for each in row["evaluations"] if each["step"] == row["best_step"])


# Distillation: each seed continues as a student of the ensemble of all, with less dropout, on two
# or three times as many pairs.

TEACHERS = [RUNS / "teachers" / f"{seed}" for seed in SEEDS]
TAUGHT = RUNS / "distillation"
BLIND = ("test_2017_flickr", "test_2017_mscoco", "test_2018_flickr")
SEARCH = DecodeConfig(beam=5, penalty="power", alpha=1.2)
"""The search with the highest mean score of all students on the development set."""
CONTINUED: Changes = {**SIXTH, **fields("optimizer", learning_rate=0.0025, warmup=100)}


def mixed(*files: str) -> Changes:
    """Returns the changes for training on the references and corpora of the teachers, equally."""
    corpora = [MULTI30K.name(MULTI30K.train), *(f"{TAUGHT}/{name}.tsv" for name in files)]
    weighted = fields("data", train=corpora, weights=[1.0] * len(corpora))
    return {**weighted, "model.dropout": 0.2}


STUDENTS: dict[str, Changes] = {
    "nearest": mixed("nearest"),
    "nearest_and_back": mixed("nearest", "back"),
    "nearest_and_back_longer": {
        **mixed("nearest", "back"),
        **steps(6400),
        "optimizer.learning_rate": 0.005,
    },
}


def teach(data: Data) -> None:
    """Trains the teachers and a model from German to English, and writes the corpora that they
    make of the training data."""
    swapped = data._replace(pattern=",".join(reversed(data.pattern.split(","))))
    recipe, reverse = (replace(ON_MULTI30K, data=each).configs()[""] for each in (data, swapped))
    configs = {f"{seed}": changed(recipe, {"train.seed": seed}) for seed in SEEDS}
    folder = TEACHERS[0].parent
    list(train_each({**configs, "reverse": reverse}, folder))
    distillation.write_corpora(TEACHERS, folder / "reverse", data, TAUGHT)


def compare_students(rows: Rows, data: Data) -> dict[str, Any]:
    """Returns the scores of the ensemble of the teachers, how the students differ from the
    first ones, and the mean score of all with each length penalty."""
    ensemble, _ = scores.translate(TEACHERS, data)
    by_alpha = [row["val_bleu_by_alpha"] for row in rows.values()]
    means = {alpha: statistics.mean(each[alpha] for each in by_alpha) for alpha in by_alpha[0]}
    students = compare_changes([*STUDENTS], rows, data)
    return {"ensemble": ensemble, "mean_val_bleu_by_alpha": means, **students}


def compare_with_teachers(rows: Rows, data: Data) -> dict[str, Any]:
    """Returns the statistics over the seeds, also of the teachers, and the paired bootstrap of each
    student against its teacher."""
    _, references = data.sides(data.test)
    teachers, bootstrap = {}, []
    for path in TEACHERS:
        trained, tested = load(path), data._replace(blind=())
        teachers[path.name], outputs = scores.translations(trained, tested, searches=[SEARCH])
        student = outputs_file("multi30k_seeds", path.name, data.test)
        bootstrap.append(compare(outputs[data.test], [*read_lines(f"{student}")], references))
    taught = {**over_seeds(teachers), "rows": teachers}
    return {**over_seeds(rows), "teachers": taught, "bootstrap": bootstrap}


def continues(run: Path, source: Path, *options: str) -> list[list[str]]:
    """Returns the command that begins a run with the parameters of another one."""
    return [["train", f"--config={run}.py", f"--run={run}", f"--init-from={source}", *options]]


# Few pairs: the reverse model, trained on them, translates the German sides that are left out.

FEW = (3_000, 10_000)
FILES = RUNS / "small"
FEW_PAIRS: dict[str, Changes] = {"recipe_29000": {}}
for _count in FEW:
    _files = [f"{FILES}/{_count}.tsv", f"{FILES}/{_count}.back.tsv"]
    FEW_PAIRS[f"recipe_{_count}"] = {"data.train": _files[:1]}
    FEW_PAIRS[f"back_{_count}"] = {"data.train": _files, "data.weights": [1.0, 1.0]}
FEW_PAIRS["smaller_3000"] = {**FEW_PAIRS["recipe_3000"], "tokenizer.vocabulary": 1_000}


def write_few_pairs(data: Data) -> None:
    """Writes the few pairs, in both directions, and the German sides that are left out."""
    pairs = list(data.corpus(data.train).pairs())
    random.Random(0).shuffle(pairs)
    write_rows(FILES / "val.de-en.tsv", (pair[::-1] for pair in data.corpus(data.dev).pairs()))
    for count in FEW:
        write_rows(FILES / f"{count}.tsv", pairs[:count])
        write_rows(FILES / f"{count}.de-en.tsv", (pair[::-1] for pair in pairs[:count]))
        write_rows(FILES / f"{count}.rest.de", (pair[1:] for pair in pairs[count:]))


def back_translation(count: int) -> list[list[str]]:
    """Returns the commands that train the reverse run, and translate what is left out of it."""
    few, run = FILES / str(count), f"--run={RUNS}/small_data/reverse_{count}"
    names = {"data.train": f"{few}.de-en.tsv", "data.dev": f"{FILES}/val.de-en.tsv"}
    options = [f"--config.{name}={value}" for name, value in {**SIXTH, **names}.items()]
    files = [f"--text={few}.rest.de", f"--pairs={few}.tsv", f"--output={few}.back.tsv"]
    train = ["train", "--config=configs/multi30k_en_de.py", run, *options]
    return [train, ["back-translate", run, *files]]


# Adaptation: a model of captions continues on LibreOffice's help, all with as many steps.

SHORT: Changes = {
    **steps(250),
    **fields("train", evaluate_every=125, save_every=125, log_every=25),
    "optimizer.warmup": 50,
}
HELP, OF_CAPTIONS = LIBREOFFICE.name(LIBREOFFICE.train), MULTI30K.name(MULTI30K.train)
VOCABULARY = fields("tokenizer", vocabulary=4000, symbols=[])
ADAPTED: dict[str, Changes] = {
    "captions": {
        **VOCABULARY,
        **steps(500),
        **fields("train", evaluate_every=250, save_every=250),
        **fields("data", train=[OF_CAPTIONS], dev=[MULTI30K.name(MULTI30K.dev)]),
        "optimizer.warmup": 100,
    },
    "scratch": {},
    "continued": VOCABULARY,
    "new_vocabulary": {},
    "fifth_of_the_rate": {"optimizer.learning_rate": 0.001},
    "frozen_encoder": {"optimizer.frozen": ["encoder"]},
    "mixed": fields("data", train=[HELP, OF_CAPTIONS], weights=[3.0, 1.0]),
}


def train_captions(data: Data) -> None:
    """Trains the model of captions that the others continue."""
    configs = replace(STUDIES["adaptation"], data=data).configs()
    list(train_each({"captions": configs["captions"]}, RUNS / "adaptation"))


def adapts(label: str) -> list[list[str]]:
    """Returns the command that begins a run with the parameters of the captions'."""
    vocabulary = [] if label == "continued" else ["--new-vocabulary"]
    return continues(RUNS / "adaptation" / label, RUNS / "adaptation" / "captions", *vocabulary)


def compare_frozen(_: Rows, data: Data) -> dict[str, Any]:
    """Returns the speed of a training step with and without a frozen encoder, in turns."""
    configs = replace(STUDIES["adaptation"], data=data).configs()
    trained = {label: configs[label] for label in ("new_vocabulary", "frozen_encoder")}
    return {"train_tokens_per_s": attention_kinds.speeds(trained)}


# Kinds of attention: "soft" is the paper's, and "modern" has rotary positions and one KV head. Two
# kinds are used in the last layer only, where a sampled choice changes the prediction of its own
# token only.

cross = partial(fields, "model.cross_attention")
KINDS: dict[str, Changes] = {
    "soft": {},
    "hard": cross(kind="hard", layer=3),
    "gumbel": cross(kind="gumbel", layer=3),
    "local-m": cross(kind="local-m", window=4),
    "local-p": cross(kind="local-p", window=4),
    "latent": cross(kind="latent"),
    "additive": cross(score="additive"),
    "plain": {"model.encoder_attention.kind": "plain"},
    "ssru": {"model.self_layer": "ssru"},
    "modern": {"model.positions": "rotary", "model.kv_heads": 1},
}


DECODED = ("soft", "ssru")
"""Kinds whose translation is timed: a decoder with self-attention, and one without."""


def compare_kinds(rows: Rows, data: Data) -> dict[str, Any]:
    """Adds the speed of each kind to its row, since they are timed in turns. Returns the noise of
    the gradients of those that sample."""
    study = replace(STUDIES["attention_kinds"], data=data)
    speeds = attention_kinds.speeds(study.configs())
    estimators: dict[str, Any] = {"samples": attention_kinds.GRADIENTS}
    trained = {label: RUNS / "attention_kinds" / label for label in DECODED}
    if all(map(exists, trained.values())):
        sources, _ = data.sides(data.dev)
        for label, speed in attention_kinds.decode_speeds(trained, sources).items():
            rows[label]["sentences_per_s"] = speed
    for label, row in rows.items():
        row["train_tokens_per_s"] = speeds[label]
        estimators |= row.get("estimators", {})
    return {"estimators": estimators}


# Labels of recipes: latent attention and its baselines. The config was chosen on another sample.

SOFT = cross(kind="soft")
MODELS: dict[str, Changes] = {
    "latent": {},
    "soft": SOFT,
    "soft_wide": {
        **SOFT,
        **steps(2000),
        **fields("train", evaluate_every=2000, save_every=2000),
        **fields("model", heads=1, d_model=128),
    },
    "latent_no_positions": {"model.positions": "none"},
    "soft_no_positions": {**SOFT, "model.positions": "none"},
    "soft_encoder": {**SOFT, "model.layers": 1, "model.d_ff": 128},
}


def compare_models(rows: Rows, _: Data) -> dict[str, Any]:
    """Returns the shares of each model by seed."""
    models = {}
    for label in MODELS:
        runs = [rows[f"{label}_{seed}"] for seed in SEEDS]
        fixed = {name: runs[0][name] for name in ("parameters", "steps")}
        shares = {name: [run[name] for run in runs] for name in ("both", "trigger", "action")}
        models[label] = fixed | shares
    return {"seeds": SEEDS, "models": models}


def training_curves(rows: Rows) -> Figure:
    """Plots the evaluations of the only run."""
    return plot.training_curves({"": rows[""]["evaluations"]})


ON_MULTI30K = Study(
    "Trains and evaluates on Multi30k", MULTI30K, {"": {}}, keep_outputs=True, draw=training_curves
)
STUDIES = {
    "multi30k_en_de": ON_MULTI30K,
    "multi30k_en_fr": replace(
        ON_MULTI30K,
        about="Trains and evaluates on Multi30k from English to French",
        data=MULTI30K._replace(language="fr"),
    ),
    "multi30k_seeds": Study(
        "Trains a student of the ensemble of the teachers with three seeds",
        MULTI30K._replace(blind=BLIND),
        {f"{seed}": {**STUDENTS["nearest_and_back_longer"], "train.seed": seed} for seed in SEEDS},
        CONTINUED,
        score=partial(scores.translations, searches=[SEARCH]),
        keep_outputs=True,
        prepare=teach,
        before={
            f"{seed}": continues(RUNS / f"multi30k_seeds/{seed}", TEACHERS[seed]) for seed in SEEDS
        },
        summarize=compare_with_teachers,
    ),
    "multi30k_published": Study(
        "Trains with the published settings",
        MULTI30K,
        {"published_0": PUBLISHED},
        score=partial(scores.translations, average=True),
    ),
    "ablations": Study(
        "Changes one part of the recipe at a time",
        MULTI30K,
        with_seeds(CHANGES, TWO_SEEDS),
        steps(4266),
        summarize=partial(compare_changes, [*CHANGES]),
    ),
    "distillation": Study(
        "Trains students of the ensemble of the seeds",
        MULTI30K,
        with_seeds(STUDENTS, TWO_SEEDS),
        CONTINUED,
        prepare=teach,
        before={
            f"{label}_{seed}": continues(TAUGHT / f"{label}_{seed}", TEACHERS[seed])
            for label in STUDENTS
            for seed in TWO_SEEDS
        },
        summarize=compare_students,
    ),
    "small_data": Study(
        "Trains on few pairs, and with back-translation",
        MULTI30K,
        FEW_PAIRS,
        SIXTH,
        prepare=write_few_pairs,
        before={f"back_{count}": back_translation(count) for count in FEW},
    ),
    "libreoffice_en_de": Study(
        "Trains and evaluates on LibreOffice's help",
        LIBREOFFICE,
        {"": {}},
        config="configs/libreoffice_en_de.py",
        keep_outputs=True,
    ),
    "adaptation": Study(
        "Continues a model of captions on LibreOffice's help",
        LIBREOFFICE,
        ADAPTED,
        SHORT,
        score=partial(adaptation.both_domains, old=MULTI30K),
        config="configs/libreoffice_en_de.py",
        prepare=train_captions,
        before={label: adapts(label) for label in [*ADAPTED][2:]},
        summarize=compare_frozen,
        draw=adaptation.picture,
    ),
    "attention_kinds": Study(
        "Trains ten variants of attention on Multi30k",
        MULTI30K,
        KINDS,
        {
            **TINY,
            **steps(2000),
            **fields("train", evaluate_every=2000, save_every=250),
            "model.dropout": 0.2,
            "data.batch_tokens": 2048,
            "optimizer.learning_rate": 0.003,
        },
        score=attention_kinds.score,
        summarize=compare_kinds,
        draw=attention_kinds.picture,
    ),
    "recipes": Study(
        "Trains latent attention and its baselines",
        RECIPES,
        with_seeds(MODELS, SEEDS),
        {"train.evaluate_every": 1000},
        score=scores.labels,
        config="configs/recipes.py",
        summarize=compare_models,
    ),
}


def main(name: tyro.conf.Positional[str], data: str = "", only: tuple[str, ...] = ()) -> None:
    """Runs a study."""
    restart_with_allocator()
    if name not in STUDIES:
        sys.exit(f"NAME={name}: must be one of {', '.join(STUDIES)}")
    study = STUDIES[name]
    if data:
        study = replace(study, data=study.data._replace(folder=data))
    cache_programs()
    run_study(name, study, only)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
