"""The commands and their options. Docstrings are the help that users read.

To add a command, add its options here and to `COMMANDS`, and write a module in this package with
the command's name and a function `run(options)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.conf import arg

from transformer_jax.benchmark.settings import AttentionBenchmark, DType, MaskName


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every command."""

    takes_config: ClassVar[bool] = False
    """Whether the command takes `--config`; its function is then `run(options, config)`."""

    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Options of every command that builds a model."""

    kind: Annotated[tuple[str, ...], arg(metavar="LABEL=M:F")] = ()
    """Your own kinds of attention: LABEL=MODULE:FUNCTION."""


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Options):
    """Options of every command that several processes can run together."""

    processes: Annotated[int | None, arg(metavar="N")] = None
    """Number of processes to start here."""
    coordinator: Annotated[str | None, arg(metavar="ADDR")] = None
    """Process 0 as HOST:PORT, or auto."""
    process: Annotated[str | None, arg(metavar="I/N")] = None
    """Index and number, such as 0/2."""


@dataclass(frozen=True, kw_only=True)
class Train(ProcessOptions, ModelOptions):
    """Train a model, or continue the run that is in the folder.

    transformer-jax train --config=configs/quickstart.py --run=runs/quickstart

    Any field of the config can follow: --config.model.layers=4 (all of them: --help-config).
    """

    takes_config = True

    run: Annotated[str, arg(metavar="PATH")]
    """Folder of the run; the same command given again continues the run."""
    new: bool = False
    """Refuse to continue a run."""
    init_from: Annotated[str | None, arg(metavar="RUN")] = None
    """Run whose parameters and tokenizer a new run starts with."""
    profile: int = 0
    """Number of steps to trace into RUN/profile."""
    tensorboard: bool = False
    """Write TensorBoard events into RUN/tensorboard."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions(ProcessOptions, ModelOptions):
    """Options of every command that translates. The defaults are those of the run's config."""

    run: Annotated[str, arg(metavar="PATH")]
    """Folder of the run."""
    step: Annotated[int | None, arg(metavar="N")] = None
    """Checkpoint; default: the best one."""
    beam: Annotated[int | None, arg(metavar="N")] = None
    """Beam size; 1: greedy search."""
    penalty: Annotated[Literal["gnmt", "power"] | None, arg(metavar="gnmt|power")] = None
    """((5 + L) / 6)^alpha, or L^alpha."""
    alpha: Annotated[float | None, arg(metavar="X")] = None
    """Exponent of the length penalty."""
    mesh: Annotated[tuple[str, ...], arg(metavar="AXIS=N")] = ()
    """Mesh of devices, such as fsdp=4."""


@dataclass(frozen=True, kw_only=True)
class Translate(SearchOptions):
    """Translate lines of text: one output line for each input line, in order.

    echo "The old teacher buys a new book." | transformer-jax translate --run=runs/quickstart
    """

    input: str = "-"
    """Text file to read, may end in .gz; -: standard input."""
    output: str = "-"
    """Text file to write; -: standard output."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(SearchOptions):
    """Score translations: BLEU and chrF with their signatures, loss and perplexity.

    transformer-jax evaluate --run=runs/quickstart --data grammar:test
    """

    data: Annotated[tuple[str, ...], arg(metavar="CORPUS")] = ()
    """Corpora; default: the run's data.dev."""
    language: Annotated[str | None, arg(metavar="CODE")] = None
    """Target's code: adds tokenized BLEU."""
    show: int = 0
    """Number of translations to show."""
    json: bool = False
    """Print the scores as JSON."""


@dataclass(frozen=True, kw_only=True)
class Average(Options):
    """Average the parameters of several checkpoints into a new run.

    transformer-jax average --run=runs/base --last 5 --out=runs/base-average
    """

    run: Annotated[str, arg(metavar="PATH")]
    """Folder of the run."""
    out: Annotated[str, arg(metavar="PATH")]
    """Folder of the new run."""
    last: Annotated[int | None, arg(metavar="N")] = None
    """Number of newest checkpoints; default: all but an older best one."""
    steps: tuple[int, ...] = ()
    """Steps of the checkpoints, instead of the newest."""


@dataclass(frozen=True, kw_only=True)
class Inspect(ModelOptions):
    """Show what training takes: parameters, batch shapes, operations, memory of each device.

    transformer-jax inspect --config=configs/quickstart.py --devices 8 --config.mesh.fsdp=4
    """

    takes_config = True

    run: Annotated[str | None, arg(metavar="PATH")] = None
    """Folder of a run, whose config and tokenizer to inspect."""
    devices: Annotated[int | None, arg(metavar="N")] = None
    """Number of devices to plan for; default: those here."""
    topology: Annotated[str | None, arg(metavar="SLICE")] = None
    """TPU slice to plan for, such as v5e:2x4 (needs the extra tpu)."""
    compile: bool = False
    """Compile the steps, for the exact memory and the time that this takes."""


@dataclass(frozen=True, kw_only=True)
class BenchAttention(AttentionBenchmark, Options):
    """Compare kernels of attention, and PyTorch's if installed, by time, memory and error.

    transformer-jax bench attention --lengths 256 1024 --kernels auto my_module:my_kernel
    """

    # Only placeholders: defaults and help are those of `AttentionBenchmark`.
    lengths: Annotated[tuple[int, ...], arg(metavar="T")] = AttentionBenchmark.lengths
    batches: Annotated[tuple[int, ...], arg(metavar="B")] = AttentionBenchmark.batches
    heads: Annotated[int, arg(metavar="N")] = AttentionBenchmark.heads
    kv_heads: Annotated[int | None, arg(metavar="G")] = AttentionBenchmark.kv_heads
    head_size: Annotated[int, arg(metavar="H")] = AttentionBenchmark.head_size
    masks: Annotated[tuple[MaskName, ...], arg(metavar="full|causal")] = AttentionBenchmark.masks
    dtypes: Annotated[tuple[DType, ...], arg(metavar="TYPE")] = AttentionBenchmark.dtypes
    kernels: Annotated[tuple[str, ...], arg(metavar="KERNEL")] = AttentionBenchmark.kernels
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write FILE.json and the plot FILE.svg."""
    dump: Annotated[Path | None, arg(metavar="DIR")] = None
    """Write the optimized HLO of every program."""


COMMANDS: dict[str, type[Options]] = {
    "train": Train,
    "translate": Translate,
    "evaluate": Evaluate,
    "average": Average,
    "inspect": Inspect,
    "bench attention": BenchAttention,
}
"""Options by command. The module of a command has its name, with "_" in place of a space."""

RENAMED = {"--restart": "--new", "--key-heads": "--kv-heads"}
"""Old names of options, which are still accepted with a warning."""
