"""What each command does, once its options are read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import jax

from transformer_jax import checkpoint, corpus, loop, parallel, run
from transformer_jax import evaluate as scores
from transformer_jax.attention import register_kind
from transformer_jax.attention.kernels import load_function
from transformer_jax.config import Config, to_json
from transformer_jax.model import count_parameters
from transformer_jax.options import Average, Evaluate, Inspect, Search, Train, Translate
from transformer_jax.prepare import empty_batch, init_fn, prepare, update_fn
from transformer_jax.reporting import Reporter, TensorBoard, Terminal
from transformer_jax.tokenizer import Tokenizers
from transformer_jax.translate import Translator


def train(options: Train, config: Config) -> None:
    """Trains with a live display."""
    _register(options.kind, config, config.execution.kernel)
    parallel.cache_programs()
    with Terminal() as terminal:
        reporters: list[Reporter] = [terminal]
        if options.tensorboard:
            reporters.append(TensorBoard(options.run / "tensorboard"))
        loop.train(
            config,
            options.run,
            restart=options.restart,
            init_from=options.init_from,
            profile=options.profile,
            reporters=reporters,
        )


def translate(options: Translate) -> None:
    """Translates a file or standard input."""
    parallel.cache_programs()
    translator = _translator(options)
    interactive = options.input == "-" and sys.stdin.isatty()
    lines = translator.stream(corpus.read_lines(options.input), 1 if interactive else None)
    with _output(options.output) as out:
        for line in lines:
            print(line, file=out, flush=interactive)


def evaluate(options: Evaluate) -> None:
    """Prints the scores of each corpus, and some translations."""
    if options.show < 0:
        raise ValueError(f"--show={options.show}: must be at least 0")
    if options.language is not None:
        scores.require_language(options.language)
    parallel.cache_programs()
    translator = _translator(options)
    config = translator.config.data
    dev_loss = scores.dev_loss_fn(translator.model, translator.config, translator.mesh)
    for name in options.data or config.dev:
        pairs = list(corpus.read_pairs(name, config.fields, "validation"))
        sources, references = map(list, zip(*pairs, strict=True))
        outputs = translator(sources)
        found = scores.score(outputs, references, options.language)
        examples = corpus.tokenise(
            [name],
            translator.tokenizers,
            config,
            max_length=translator.config.model.max_length,
            split="validation",
            filters=False,
        )
        if examples.report.left_out:
            print(f"{name}: loss without over-long pairs: {examples.report}", file=sys.stderr)
        found |= dev_loss(translator.weights, examples)
        if options.json:
            search = dataclasses.asdict(translator.config.decode)
            print(json.dumps({"corpus": name, "search": search} | found, ensure_ascii=False))
            continue
        for shown in list(zip(sources, outputs, references, strict=True))[: options.show]:
            print("source     {}\noutput     {}\nreference  {}\n".format(*shown))
        signatures = found.pop("signatures")
        print(f"{name}: " + "  ".join(f"{key} {value:.4g}" for key, value in found.items()))
        for key, signature in signatures.items():
            print(f"    {key}: {signature}")


def average(options: Average) -> None:
    """Makes a run of averaged weights."""
    source = run.load(options.run)
    known = checkpoint.steps(source.checkpoints)
    steps = list(options.steps) or known[-options.last :]
    if options.last < 1:
        raise ValueError(f"--last={options.last}: must be at least 1")
    weights = checkpoint.average(source.checkpoints, steps)
    made_from = {"average_of": {"run": source.folder.name, "steps": steps}}

    def save(folder: Path) -> None:
        with checkpoint.Checkpoints(folder, keep=1) as checkpoints:
            checkpoints.save(max(steps), {"weights": weights}, {}, best=True)

    run.create(options.out, source.config, source.tokenizers, made_from, save)
    print(f"{options.out}: average of steps {', '.join(map(str, steps))}")


def inspect(options: Inspect, config: Config) -> None:
    """Prints the config and what training it takes; of a run first what needs no data."""
    _register(options.kind, config)
    parallel.cache_programs()
    print(json.dumps(to_json(config), indent=1, ensure_ascii=False))
    known = run.load(options.run) if options.run else None
    if known is not None:
        steps = checkpoint.steps(known.checkpoints)
        print(f"checkpoints {', '.join(map(str, steps)) or 'none'}")
        _print_sizes(config, known.tokenizers)
    setup = prepare(config, known)
    if known is None:
        _print_sizes(config, setup.tokenizers)
    print(f"corpus      {setup.examples.report}")
    for name, dev in setup.dev.items():
        print(f"            {name}: {dev.examples.report}")
    loader = setup.loader
    print(f"batches     {loader.batches_per_epoch:,} an epoch, {loader.fill:.1%} of slots filled")
    print(f"programs    {len(loader.shapes)} training steps, one for each shape of a batch:")
    state = jax.eval_shape(init_fn(setup), jax.random.key(0), empty_batch(loader.shapes[0]))
    step = parallel.compile(update_fn(setup), setup.mesh, donate=True)
    for shape in loader.full_shapes():
        batch = parallel.put(empty_batch(shape, config.data.packing), setup.mesh)
        analysis = step.lower(state, batch, jax.random.key(0)).compile().memory_analysis()
        size = f"{shape.rows:>5} rows x {shape.source:>3} source x {shape.target:>3} target"
        memory = analysis.temp_size_in_bytes / 2**20
        print(f"            {size}  {memory:>9,.1f} MiB of temporaries")
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    print(f"memory      {held / 2**20:,.1f} MiB of weights and optimizer on each device")


def _print_sizes(config: Config, tokenizers: Tokenizers) -> None:
    sizes = tokenizers.source.size, tokenizers.target.size
    print(f"vocabulary  {sizes[0]:,} source, {sizes[1]:,} target ids")
    print(f"parameters  {count_parameters(config.model, *sizes):,}")


def _register(kinds: Sequence[str], config: Config, kernel: str = "auto") -> None:
    """Makes the kinds of attention known that the command line names, and the kernel's module."""
    look_here([*kinds, kernel])
    model = config.model
    attentions = (model.encoder_attention, model.decoder_attention, model.cross_attention)
    for given in kinds:
        label, equals, name = given.partition("=")
        if not (label and equals):
            raise ValueError(f"--kind {given}: must be LABEL=MODULE:FUNCTION")
        if label not in (attention.kind for attention in attentions):
            raise ValueError(
                f"--kind {given}: no attention of the config is of this kind; one is with "
                f"--config.model.cross-attention.kind={label}"
            )
        register_kind(label, load_function("--kind", name))


def look_here(names: Sequence[str]) -> None:
    """If one is MODULE:FUNCTION, modules are found in the current folder too, as by `python -m`."""
    if any(":" in name for name in names) and "" not in sys.path:
        sys.path.insert(0, "")


def _translator(options: Search) -> Translator:
    loaded = run.load(options.run)
    _register(options.kind, loaded.config)
    wanted = {"beam": options.beam, "penalty": options.penalty, "alpha": options.alpha}
    given = {name: value for name, value in wanted.items() if value is not None}
    decode = dataclasses.replace(loaded.config.decode, **given)
    return Translator.load(options.run, step=options.step, decode=decode)


@contextlib.contextmanager
def _output(path: str) -> Iterator[IO[str]]:
    """A text file that appears whole or not at all; "-" is standard output."""
    if path == "-":
        yield sys.stdout
        sys.stdout.flush()
    elif Path(path).exists() and not Path(path).is_file():
        with Path(path).open("w", encoding="utf-8") as out:
            yield out
    else:
        temporary = Path(f"{path}.{os.getpid()}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as out:
                yield out
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
