"""Brings the generated parts of README.md and docs/*.md up to date with the code and results/.

A part stands between `<!-- NAME -->` and `<!-- end -->`; NAME is a key of `PARTS`, and any document
may have it.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any, get_args, get_type_hints

from tools import ablations, seeds, small_data
from tools.collectives import KINDS as COLLECTIVES
from tools.measure import RECIPES
from transformer_jax import config as config_module
from transformer_jax.benchmark import results
from transformer_jax.config import Config

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

PACKAGE = Path("transformer_jax")

BLEU = ("bleu_lower_tokenized", "bleu_cased_13a")
"""The scores of Multi30k that are shown side by side."""

OTHER_FILES = {
    "deploy/": "scripts for Slurm, Kubernetes and TPU pods, which restart training until its end",
    "tests/": "a folder for each package, and fixtures",
    "docs/": "the pages of the site: tutorial, how-to pages, the paper in the code, results",
    "CONTRIBUTING.md": "the architecture, the rules of the code, and where to change what",
    "notebooks/": "the tutorial, from one sentence to a change of the model, as notebooks",
    "results/": "measured numbers and figures, each with the command that made it",
    "tools/": "makes documents and pictures from code and results; the project's own measurements",
    "Makefile": "every command of the project",
    "pyproject.toml": "package, dependencies, settings of the tools",
    "constraints.txt": "exact versions of all dependencies",
    ".ci/run": "what every change must pass",
}


def real_sizes() -> str:
    """Returns what each recipe for a real size takes."""
    found = results.read("real_sizes")
    rows = [
        (
            f"`configs/{name}.py`",
            f"{plan['parameters']:,}",
            f"{plan['steps']:,}",
            f"{plan['batch_tokens']:,}",
            f"{plan['tflop_per_step']:.1f}",
            f"{plan['eflop']:.2f}",
            f"{plan['memory_mib'] / 1024:.1f}",
            f"{plan['hours_at_peak']:.2f}",
        )
        for name, plan in found["recipes"].items()
    ]
    names = ("config", "parameters", "steps", "tokens of a batch", "TFLOP a step", "EFLOP in all")
    return _table((*names, "GiB a chip", "hours at peak"), rows)


def multi30k_line() -> str:
    """Returns the score of the recipe of Multi30k beside the best published one, in a sentence."""
    found = results.read("multi30k_seeds")
    run = found["rows"][f"recipe_{found['seeds'][0]}"]
    bleu, deviation = found["mean_lower_tokenized"], found["deviation_lower_tokenized"]
    return (
        f"**{bleu:.2f} ± {deviation:.2f} BLEU** on Multi30k English-German (test_2016_flickr, "
        f"lower-cased and tokenized, {len(found['seeds'])} seeds), with "
        f"{run['parameters'] / 1e6:.1f} million parameters, trained on a CPU. The best "
        "published score of this size is 41.02."
    )


def multi30k() -> str:
    """Returns the scores, their signatures, the size and the cost of the recipe of Multi30k, beside
    the best published scores of small models."""
    found = results.read("multi30k_seeds")
    runs = [found["rows"][f"recipe_{seed}"] for seed in found["seeds"]]
    signatures = {name: text.replace("|", "\\|") for name, text in runs[0]["signatures"].items()}
    tokens = mean(run["target_tokens"] for run in runs)

    def spread(name: str, form: str = ".2f") -> str:
        return f"{found[f'mean_{name}']:{form}} ± {found[f'deviation_{name}']:{form}}"

    rows = [
        (
            f"BLEU, lower-cased and tokenized (`{signatures['bleu_lower_tokenized']}`)",
            spread("lower_tokenized"),
            "41.02 (Wu et al. 2021, 2.6 million parameters)",
        ),
        (
            f"BLEU, cased (`{signatures['bleu']}`), and chrF2 (`{signatures['chrf']}`)",
            f"{spread('cased_13a')}, {spread('chrf')}",
            "BLEU 36.99 ± 0.24 (7.6 million parameters)",
        ),
        (
            f"training of {runs[0]['parameters']:,} parameters on {tokens / 1e6:.1f} million "
            f"target tokens, each on one of {_processor(found)}",
            f"{spread('minutes', '.0f')} minutes",
            "",
        ),
    ]
    title = f"Multi30k English-German, test_2016_flickr, mean ± deviation of {len(runs)} seeds"
    return _table((title, "this project", "published"), rows)


def multi30k_samples() -> str:
    """Returns the translations of Multi30k's test set with the lowest and the highest chrF2."""
    return _samples(results.read("multi30k_en_de")["samples"])


def _samples(found: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for kind, samples in found.items():
        for sample in samples:
            texts = (sample[name].replace("|", "\\|") for name in ("source", "output", "reference"))
            rows.append((f"{kind}, line {sample['line']}", *texts))
    return _table(("", "source", "output", "reference"), rows)


def multi30k_lengths() -> str:
    """Returns the development BLEU of each seed by the exponent of the length penalty."""
    found = results.read("multi30k_seeds")
    runs = {seed: found["rows"][f"recipe_{seed}"] for seed in found["seeds"]}
    rows = [
        (f"seed {seed}", *(f"{bleu:.2f}" for bleu in run["val_bleu_by_alpha"].values()))
        for seed, run in runs.items()
    ]
    return _table(("BLEU on val with α", *runs[0]["val_bleu_by_alpha"]), rows)


def multi30k_seeds() -> str:
    """Returns the scores of each seed of the recipe and of the one before, as far as trained."""
    found = results.read("multi30k_seeds")
    rows = []
    for name, title in (("recipe", "the recipe"), ("first", "the recipe before")):
        runs = [found["rows"].get(f"{name}_{seed}") for seed in seeds.SEEDS]
        rows.append((title, *map(_bleu, runs), _mean_bleu([run for run in runs if run])))
    if tests := found.get("bootstrap"):
        rows.append(("p of the cased scores", *(f"{t['bleu']['p_value']:.3f}" for t in tests), ""))
    titles = (f"seed {seed}" for seed in seeds.SEEDS)
    return _table(("lower-cased tokenized / cased", *titles, "mean ± deviation"), rows)


def _bleu(run: dict[str, Any] | None) -> str:
    """Returns both BLEU scores of a run; "" if it is not trained yet."""
    return "" if run is None else " / ".join(f"{run[score]:.2f}" for score in BLEU)


def _mean_bleu(runs: list[dict[str, Any]]) -> str:
    """Returns the mean and the standard deviation of both BLEU scores; "" if a seed is missing."""
    if len(runs) < len(seeds.SEEDS):
        return ""
    columns = ([run[score] for run in runs] for score in BLEU)
    return " / ".join(f"{mean(column):.2f} ± {stdev(column):.2f}" for column in columns)


def multi30k_ablations() -> str:
    """Returns the scores of each change to the recipe on both sets, as far as it is trained."""
    found = results.read("ablations")
    rows = []
    for name in ablations.CHANGES:
        runs = [found["rows"].get(f"{name}_{seed}") for seed in ablations.SEEDS]
        trained = [run for run in runs if run]
        if not trained:
            continue
        whole = found.get("changes", {}).get(name)
        rows.append(
            (
                "the recipe" if name == ablations.BASE else f"`{name}`",
                *("" if run is None else f"{run[ablations.SCORE]:.2f}" for run in runs),
                f"{whole['difference']:+.2f}" if whole and name != ablations.BASE else "",
                whole["verdict"] if whole and name != ablations.BASE else "",
                f"{mean(_best_loss(run) for run in trained):.3f}",
                f"{mean(run['bleu_cased_13a'] for run in trained):.2f}",
            )
        )
    titles = (f"seed {seed}" for seed in ablations.SEEDS)
    head = ("change", *titles, "difference", "better or worse", "loss, mean", "test, mean")
    return _table(head, rows)


def _best_loss(run: dict[str, Any]) -> float:
    """Returns the loss on the development set of the checkpoint that was evaluated."""
    return next(each["loss"] for each in run["evaluations"] if each["step"] == run["best_step"])


def multi30k_published() -> str:
    """Returns the scores and the cost of the published settings, beside those of the recipe."""
    recipe, published = results.read("multi30k_seeds"), results.read("multi30k_published")
    runs = [recipe["rows"][f"recipe_{seed}"] for seed in recipe["seeds"]]
    ways = {
        f"the recipe, mean of {len(runs)} seeds": runs,
        "the settings of Wu et al. 2021, one seed": [published["rows"]["published_0"]],
    }
    rows = [
        (
            title,
            " / ".join(f"{mean(run[score] for run in found):.2f}" for score in BLEU),
            f"{mean(run['parameters'] for run in found) / 1e6:.1f} million",
            f"{mean(run['target_tokens'] for run in found) / 1e6:.1f} million",
            f"{mean(run['minutes'] for run in found):.0f}",
        )
        for title, found in ways.items()
    ]
    head = ("", "lower-cased tokenized / cased", "parameters", "target tokens", "minutes")
    return _table(head, rows)


def multi30k_few() -> str:
    """Returns both BLEU scores of each way of training on few pairs, as far as trained."""
    rows = results.read("small_data")["rows"]
    titles = {way: f"the same, with {name}" for way, name in small_data.WAYS.items()}
    titles["recipe"] = "the recipe, with a sixth of its steps"
    counts = sorted({int(name.partition("_")[2]) for name in rows})
    table = [
        (title, *(_bleu(rows.get(f"{way}_{count}")) for count in counts))
        for way, title in titles.items()
        if any(name.startswith(way) for name in rows)
    ]
    return _table(("lower-cased tokenized / cased", *(f"{n:,} pairs" for n in counts)), table)


def multi30k_fr() -> str:
    """Returns the scores and the cost of the recipe of Multi30k from English to French."""
    found = results.read("multi30k_en_fr")
    rows = [*_scores(found), _training(found)]
    return _table(("Multi30k English-French, test_2016_flickr", ""), rows)


def libreoffice() -> str:
    """Returns the scores, what is kept, and the cost of the recipe of LibreOffice's help."""
    found = results.read("libreoffice_en_de")
    kept = [
        (f"lines that keep their {name}", f"{kept['kept']} of {kept['lines']}")
        for name, kept in found["kept"].items()
    ]
    rows = [*_scores(found), *kept, _training(found)]
    return _table(("LibreOffice's help, English-German, dev", ""), rows)


def _scores(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("BLEU, lower-cased and tokenized", f"{found['bleu_lower_tokenized']:.2f}"),
        ("BLEU, cased, and chrF2", f"{found['bleu_cased_13a']:.2f}, {found['chrf']:.2f}"),
    ]


def _training(found: dict[str, Any]) -> tuple[str, str]:
    """Returns what a run was trained on, and how long that took."""
    tokens = f"{found['target_tokens'] / 1e6:.1f} million target tokens"
    model = f"training of {found['parameters']:,} parameters"
    return f"{model} on {tokens}, {_processor(found)}", f"{found['minutes']:.0f} minutes"


def libreoffice_samples() -> str:
    """Returns the translations of LibreOffice's help with the lowest and the highest chrF2."""
    return _samples(results.read("libreoffice_en_de")["samples"])


def _processor(found: dict[str, Any]) -> str:
    """Returns the accelerators that a result was trained or measured on, or cores and processor."""
    devices = found.get("card", {}).get("provenance", {}).get("devices", {"platform": "cpu"})
    if devices["platform"] != "cpu":
        return f"{devices['count']} {devices['kind']}"
    machine = found["machine"]
    if accelerators := machine.get("accelerators"):
        return f"{len(accelerators)} {accelerators[0]}"
    cores, processor = machine["cores"], machine["processor"]
    return f"{cores} CPU core{'' if cores == 1 else 's'} ({processor})"


def _cards(found: dict[str, Any]) -> str:
    """Returns whether a result has a run card, or each of its rows has one."""
    if "card" in found:
        return "yes"
    rows = found.get("rows")
    return "each row" if isinstance(rows, dict) and any("card" in r for r in rows.values()) else ""


def _versions(found: dict[str, Any]) -> str:
    """Returns the versions with which a result was trained, or else measured."""
    versions = found.get("card", {}).get("provenance", found)["versions"]
    return f"Python {versions['python']}, JAX {versions['jax']}, Flax {versions['flax']}"


def attention() -> str:
    """Returns PyTorch's time over that of kernel `auto`, with quartiles."""
    found = results.read("attention")
    columns = list(itertools.product(("forward", "both"), ("1", "8")))
    rows = []
    for mask, note in (("", ""), ("_causal", ", causal")):
        ratios, spreads = found[f"ratio_to_torch{mask}"], found[f"ratio_to_torch{mask}_spread"]
        for length in ratios["forward"]["1"] if ratios else ():
            cells = (
                _ratio(*(_at(table, d, batch, length) for table in (ratios, spreads)))
                for d, batch in columns
            )
            rows.append((f"{int(length):,}{note}", *cells))
    names = {"forward": "forward", "both": "forward and backward"}
    head = ("length", *(f"{names[d]}, batch {b}" for d, b in columns))
    return _table(head, rows)


def _at(table: dict[str, Any], *keys: str) -> Any:
    """Returns the entry of a nested table; None if there is none."""
    for key in keys:
        table = table.get(key, {})
    return table or None


def _ratio(median: float | None, quartiles: list[float] | None) -> str:
    if median is None or quartiles is None:
        return ""
    return "{:.2f} ({:.2f} to {:.2f})".format(median, *quartiles)


def attention_setting() -> str:
    """Returns the sizes, the machine and the peer of the table of kernel `auto`."""
    found = results.read("attention")
    heads = f"{found['heads']} heads of {found['head_size']}"
    if found["kv_heads"]:
        heads += f", {found['kv_heads']} of keys and values"
    torch = found["pytorch"]
    peer = f"PyTorch {torch['version']} with {torch['threads']} threads" if torch else "no PyTorch"
    return f"float32, {heads}, {_processor(found)}, JAX {found['versions']['jax']}, {peer}:"


def layers() -> str:
    """Returns the times and the memory of separate and of stacked layers."""
    rows = [
        (
            f"{name}, {layers}",
            f"{found[layers]['step_ms']:,.0f}",
            f"{found[layers]['compile_s']:.1f}",
            f"{found[layers]['temporaries_mib']:,.0f}",
        )
        for name, found in results.read("layers")["presets"].items()
        for layers in ("separate", "stacked")
    ]
    return _table(("layers", "step, ms", "compile, s", "temporaries, MiB"), rows)


def windows() -> str:
    """Returns the cost of a query of local and of global attention at each length."""
    rows = results.read("windows")["rows"]
    lengths = sorted({row["length"] for row in rows})
    found: dict[tuple[str, int | None], dict[tuple[str, int], dict[str, Any]]] = {}
    for row in rows:
        kind = found.setdefault((row["kind"], row["window"]), {})
        kind[row["mode"], row["length"]] = row

    def cells(mode: str, value: str, unit: int, text: str) -> Callable[[Any], str]:
        return lambda kind: " / ".join(format(kind[mode, n][value] / unit, text) for n in lengths)

    columns = {
        "thousand operations": cells("forward", "flops_per_query", 1000, ",.0f"),
        "µs, forward": cells("forward", "us_per_query", 1, ".1f"),
        "µs, forward and backward": cells("both", "us_per_query", 1, ".1f"),
    }
    table = [
        (f"`{kind}`, D = {window}" if window else f"`{kind}`", *(c(x) for c in columns.values()))
        for (kind, window), x in sorted(found.items(), key=lambda f: (f[0][0], f[0][1] or 0))
    ]
    return _table((f"a query, of {' / '.join(map(str, lengths))}", *columns), table)


MODES = {"beam5": "beam 5", "greedy": "greedy"}
"""Searches of the measurements of decoding."""

STOPPING = {"optimal": "`early_stopping=False`", "early": "`early_stopping=True`"}
"""Fields of the search, by how the measurements of decoding name them."""


def decode() -> str:
    """Returns the speed of decoding beside that of peers, in sentences a second."""
    found = results.read("decode")
    rows: list[tuple[str, ...]] = []
    for mode, title in MODES.items():
        rate = found["loop"]["sentences_per_s"][mode]
        peer = max(rate["ctranslate2"], rate["ctranslate2_workers"])
        numbers = (rate["ours"], peer, rate["hf_generate"])
        rows.append((f"{title}, given lengths", *(f"{number:,.0f}" for number in numbers)))
    for mode, title in MODES.items():
        rate = found["real"]["sentences_per_s"][mode]
        numbers = (rate["optimal"], max(rate["ctranslate2"], rate["ctranslate2_workers"]))
        rows.append((f"{title}, trained model", *(f"{number:,.0f}" for number in numbers), ""))
    return _table(("sentences a second", "this project", "CTranslate2", "Hugging Face"), rows)


def decode_ratios() -> str:
    """Returns the ratios of the speeds of decoding, with quartiles."""
    found = results.read("decode")
    loop, real = found["loop"], found["real"]
    peers = {
        "ctranslate2": "CTranslate2, a batch at a time",
        "ctranslate2_workers": "CTranslate2, two batches at a time",
        "hf_generate": "Hugging Face `generate`",
    }
    rows: list[tuple[str, ...]] = [
        (f"given lengths, {title}", *(_share(loop[f"ratio_to_{name}"][mode]) for mode in MODES))
        for name, title in peers.items()
    ]
    floors = (f"{loop['ratio_to_floor'][mode]:.2f}" for mode in MODES)
    rows.append(("given lengths, least time of the matmuls", *floors))
    for stop, name in itertools.product(STOPPING, ("ctranslate2", "ctranslate2_workers")):
        ratios = real[f"ratio_to_{name}"]
        title = f"trained model, {STOPPING[stop]}, {peers[name]}"
        rows.append((title, *(_share(ratios[mode][stop]) for mode in MODES)))
    return _table(("our speed over that of", *MODES.values()), rows)


def decode_bleu() -> str:
    """Returns BLEU of the trained model with both ways to stop and with CTranslate2."""
    found = results.read("decode")["real"]
    titles = STOPPING | {"ctranslate2": "CTranslate2"}
    rows: list[tuple[str, ...]] = [
        (title, *(f"{found['bleu'][mode][name]:.2f}" for mode in MODES))
        for name, title in titles.items()
    ]
    same = (f"{found['same_text'][mode]['ctranslate2']:.1%}" for mode in MODES)
    rows.append((f"outputs of {STOPPING['early']} that equal those of CTranslate2", *same))
    return _table(("BLEU on test_2016_flickr", *MODES.values()), rows)


def decode_beams() -> str:
    """Returns the scores on val by beam size."""
    rows = [
        (
            str(row["beam"]),
            f"{row['bleu']:.2f}",
            f"{row['chrf']:.2f}",
            f"{row['length_ratio']:.3f}",
        )
        for row in results.read("decode")["beams"]
    ]
    return _table(("beam", "BLEU", "chrF2", "length ratio"), rows)


def _share(found: dict[str, float]) -> str:
    return _ratio(found["median"], [found["low"], found["high"]])


def decode_step() -> str:
    """Returns where the time of a step goes, in milliseconds."""
    found = results.read("decode")["step_ms"]
    names = {"step_ms": "a step", "products": "matmuls, at least"}
    rows = [
        (str(names.get(part, part)), *(f"{found[mode][part]:.2f}" for mode in MODES))
        for part in found["beam5"]
    ]
    return _table(("ms, one batch of 25 alone", *MODES.values()), rows)


def decode_times() -> str:
    """Returns how long users wait, in seconds."""
    found = results.read("decode")
    seconds, latency = found["real"]["seconds"], found["latency"]
    rows: list[tuple[str, ...]] = [
        (title, *(f"{seconds[mode][name]:.1f}" for mode in MODES))
        for name, title in (
            ("cold", "1,000 lines, no programs cached"),
            ("cached", "1,000 lines, programs cached"),
        )
    ]
    for name, title in (("p50_ms", "a line, median"), ("p99_ms", "a line, 99 %")):
        rows.append((title, *(f"{latency[mode][name] / 1000:.3f}" for mode in MODES)))
    first = f"{seconds['first_output']:.1f}"
    rows.append(("from start to the first line, programs cached", first, ""))
    return _table(("seconds", *MODES.values()), rows)


def million_lines() -> str:
    """Returns the peak memory of `translate` after many lines."""
    found = results.read("million_lines")
    peaks = {int(count): peak for count, peak in found["peak_mib"].items()}
    rows = [(f"{count:,}", f"{peak:.0f} MiB") for count, peak in peaks.items()]
    return _table(("lines translated", "peak memory of the process"), rows)


def int8() -> str:
    """Returns what int8 matrices save and cost."""
    found = results.read("decode")["int8"]
    rows = [
        (
            name,
            f"{found['bytes'][name]['parameters'] / 2**20:.2f}",
            f"{found['bytes'][name]['temporaries'] / 2**20:.2f}",
            f"{found['bleu'][name]:.2f}",
            f"{found['seconds'][name]:.2f}",
        )
        for name in ("float32", "int8")
    ]
    head = ("weights", "parameters, MiB", "temporaries, MiB", "BLEU on val", "seconds")
    return _table(head, rows)


def recipes() -> str:
    """Returns the accuracy of latent attention and of its baselines."""
    found = results.read("recipes")["models"]
    rows = [
        (
            name,
            f"{model['parameters']:,}",
            *(_spread(model[labels]) for labels in ("both", "trigger", "action")),
        )
        for name, model in found.items()
    ]
    return _table(("% right, least to most", "parameters", "both", "trigger", "action"), rows)


def _spread(shares: list[float]) -> str:
    """Returns the least and the largest share in percent."""
    ends = [f"{100 * end:.1f}" for end in (min(shares), max(shares))]
    return " to ".join(dict.fromkeys(ends))


def attention_kinds() -> str:
    """Returns the scores of the same model with each kind of attention."""
    head = ("variant", "validation loss", "BLEU", "chrF2", "parameters", "tokens a second")
    rows = [
        (
            f"`{label}`",
            f"{found['validation_loss']:.3f}",
            f"{found['bleu_cased_13a']:.1f}",
            f"{found['chrf']:.1f}",
            f"{found['parameters']:,}",
            f"{found['train_tokens_per_s']:,.0f}",
        )
        for label, found in results.read("attention_kinds")["kinds"].items()
    ]
    return _table(head, rows)


def gradient_noise() -> str:
    """Returns the noise of the gradients of sampled choices."""
    found = results.read("attention_kinds")["estimators"]
    rows = [
        (
            name,
            f"{each['variance']:.1e}",
            f"{each['squared_mean']:.1e}"
            if each["squared_mean"] > each["variance"] / found["samples"]
            else "lost in the noise",
        )
        for name, each in found.items()
        if isinstance(each, dict)
    ]
    return _table(("gradient by", "variance", "squared mean"), rows)


def remat() -> str:
    """Returns the memory and the time of a step with each policy of rematerialization."""
    rows = [
        (
            f"`{found['remat']}`",
            f"{found['temporaries_mib']:,.0f}",
            f"{found['step_ms']:,.0f}",
            f"{found['gflop']:,.0f}",
        )
        for found in results.read("remat")["rows"]
    ]
    return _table(("`execution.remat`", "temporaries, MiB", "step, ms", "GFLOP"), rows)


def meshes() -> str:
    """Returns how far losses and gradients on meshes are from those on one device."""
    rows = [
        (name, *(_error(found[when][what]) for when in found for what in ("loss", "gradient")))
        for name, found in results.read("devices")["meshes"].items()
    ]
    head = ("mesh", "loss", "gradient", "loss after warm-up", "gradient after warm-up")
    return _table(head, rows)


def device_changes() -> str:
    """Returns how a run went on with other devices."""
    rows = [
        (
            name,
            f"{found['pairs']:,}" if found["same_pairs"] else "not the same",
            _error(found["loss"]),
        )
        for name, found in results.read("devices")["changes"].items()
    ]
    return _table(("continued on", "the same pairs", "loss"), rows)


def faults() -> str:
    """Returns the counts of the campaign of kills, signals and damages."""
    found = results.read("faults")
    phases = ", ".join(f"{count} {phase}" for phase, count in found["kills_by_phase"].items())
    statuses = sorted({f"{case['signal']}: {case['status']}" for case in found["signals"]})
    rows = [
        ("kills", f"{found['kills']} ({phases})"),
        ("of them with two processes", f"{found['kills_of_two_processes']}"),
        ("besides, before operations on files", f"{found['kills_before_file_operations']}"),
        ("signals, and statuses", f"{len(found['signals'])} ({', '.join(statuses)})"),
        ("runs that were continued", f"{found['runs_compared']}"),
        ("of them unlike a run that was never stopped", f"{found['mismatches']}"),
        ("damaged files", f"{found['damaged_files']}"),
        ("of them loaded silently", f"{found['silent_loads']}"),
        ("stall of a step by a save", f"{found['step_stall_ms']:.0f} ms"),
        ("what digests add to it", f"{found['digest_share_of_stall']:.1%}"),
    ]
    return _table(("`make faults`", ""), rows)


def billion_pairs() -> str:
    """Returns the memory and the speed of the loader on large corpora."""
    names = {"computed": "computed", "disk": "on the disk"}
    rows = [
        (
            f"{found['pairs']:,}, {names[found['kind']]}",
            f"{found['peak_mib']:,.0f}",
            f"{found['first_batch_s']:.1f}",
            f"{found['middle_s']:.1f}",
            f"{found['batch_ms']:.1f}",
        )
        for found in results.read("faults")["billion_pairs"]
    ]
    head = ("pairs", "peak memory, MiB", "first batch, s", "from the middle, s", "a batch, ms")
    return _table(head, rows)


def scaling() -> str:
    """Returns what a step takes on slices of TPUs."""
    rows = [
        (
            f"{row['model']}, {row['chips']}",
            row["mesh"],
            f"{row['params_mib'] + row['rest_of_state_mib']:,.0f}",
            f"{row['temporaries_mib']:,.0f}",
            f"{row['tflop']:,.0f}",
            *(_exchange(row["collectives"].get(kind)) for kind in COLLECTIVES),
            f"{row['matmuls_ms']:.1f}",
            f"{row['exchange_ms']:.1f}",
        )
        for row in results.read("scaling")["rows"]
    ]
    head = ("model, chips", "mesh", "state, MiB", "temporaries, MiB", "TFLOP of all chips")
    return _table((*head, *COLLECTIVES, "matmuls, ms", "links, ms"), rows)


def _exchange(found: dict[str, int] | None) -> str:
    """Returns the number and the MiB of the arrays that a kind of collective exchanges."""
    return f"{found['count']}: {found['bytes'] / 2**20:,.1f}" if found else ""


def _error(error: float) -> str:
    return f"{error:.0e}" if error else "0"


def result_table() -> str:
    """Returns what each result file holds, and with what it was measured."""
    texts = dict(re.findall(r'@echo "(make [\w-]+) +(.+)"', Path("Makefile").read_text("utf-8")))
    rows = []
    for path in sorted(results.FOLDER.glob("*.json")):
        found = results.read(path.stem)
        command = found["command"]
        # `make multi30k` writes multi30k_en_de, and `make attention` calls the command it names.
        text = texts.get(command) or texts.get(f"make {path.stem}", "")
        text = re.sub(r"( \([^)]*\))?(, results/.*)?$", "", text)
        rows.append(
            (
                f"[{path.stem}](../{path})",
                text,
                f"`{command}`",
                f"`{found['commit'][:10]}`{' with changes' * found['dirty']}, {found['date']}",
                _processor(found),
                _versions(found),
                _cards(found),
            )
        )
    head = ("result", "what", "command", "commit, date", "machine", "versions", "run card")
    return _table(head, rows)


def config_table() -> str:
    """Returns every field of the config with its default and its meaning."""
    return _table(("field", "default", "meaning"), list(_field_rows(Config(), field_texts())))


def _field_rows(
    section: Any, texts: dict[tuple[str, str], str], name: str = ""
) -> Iterator[tuple[str, ...]]:
    hints = get_type_hints(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _field_rows(value, texts, f"{name}{field.name}.")
        else:
            text = " ".join(texts[type(section).__name__, field.name].split())
            choices = get_args(hints[field.name])
            others = [f"`{x!r}`" for x in choices if isinstance(x, str) and x != value]
            default = f"`{value!r}`" + (f" (or {', '.join(others)})" if others else "")
            yield f"`{name}{field.name}`", default, text


def tree() -> str:
    """Returns the packages and the files beside them, each with what it is for."""
    configs = sorted(Path("configs").glob("*.py"))
    modules = [Path("train.py"), *(path for path in configs if path.stem not in RECIPES)]
    packages = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
    own = [path for path in sorted(PACKAGE.glob("*.py")) if path.name != "__init__.py"]
    lines = {f"{path}": first_line(path) for path in modules}
    lines["configs/{iwslt14,wmt14}_*.py"] = "IWSLT14 and WMT14 with the published settings."
    lines[f"{PACKAGE}/"] = first_line(PACKAGE / "__init__.py")
    lines |= {f"  {path.name}/": first_line(path / "__init__.py") for path in packages}
    lines |= {f"  {path.name}": first_line(path) for path in own}
    lines |= OTHER_FILES
    width = max(map(len, lines))
    return "```\n" + "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items()) + "\n```"


PARTS: dict[str, Callable[[], str]] = {
    "multi30k_line": multi30k_line,
    "multi30k": multi30k,
    "multi30k_samples": multi30k_samples,
    "multi30k_lengths": multi30k_lengths,
    "multi30k_seeds": multi30k_seeds,
    "multi30k_ablations": multi30k_ablations,
    "multi30k_published": multi30k_published,
    "multi30k_few": multi30k_few,
    "multi30k_fr": multi30k_fr,
    "libreoffice": libreoffice,
    "libreoffice_samples": libreoffice_samples,
    "decode": decode,
    "decode_ratios": decode_ratios,
    "decode_bleu": decode_bleu,
    "decode_beams": decode_beams,
    "decode_step": decode_step,
    "decode_times": decode_times,
    "int8": int8,
    "million_lines": million_lines,
    "attention": attention,
    "attention_setting": attention_setting,
    "layers": layers,
    "windows": windows,
    "recipes": recipes,
    "attention_kinds": attention_kinds,
    "gradient_noise": gradient_noise,
    "remat": remat,
    "meshes": meshes,
    "device_changes": device_changes,
    "faults": faults,
    "billion_pairs": billion_pairs,
    "scaling": scaling,
    "real_sizes": real_sizes,
    "results": result_table,
    "config": config_table,
    "tree": tree,
}


def update(text: str) -> str:
    """Returns a document's text with every generated part made again."""

    def part(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{PARTS[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", part, text, flags=re.S)


def main() -> None:
    """Rewrites the documents."""
    for document in DOCUMENTS:
        document.write_text(update(document.read_text("utf-8")), "utf-8")


def first_line(path: Path) -> str:
    """Returns the first line of a module's docstring, or ""."""
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]


def field_texts() -> dict[tuple[str, str], str]:
    """Returns the docstring of each field, by dataclass and name, from the source of config.py."""
    source = Path(str(config_module.__file__)).read_text("utf-8")
    texts: dict[tuple[str, str], str] = {}
    for part in ast.parse(source).body:
        if isinstance(part, ast.ClassDef):
            for field, text in itertools.pairwise(part.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    texts[part.name, ast.unparse(field.target)] = ast.literal_eval(text.value)
    return texts


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    main()
