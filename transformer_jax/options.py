"""The options of each command. Docstrings are the help that users see."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model, or continue the run that is in the folder.

    transformer-jax train --config=configs/quickstart.py --run=runs/quickstart

    Any field of the config can follow: --config.model.layers=4 (all of them: --help-config).
    """

    run: Path
    """Folder of the run; the same command given again continues it."""
    restart: bool = False
    """Begin anew; the folder must be missing or empty."""
    init_from: Annotated[Path | None, arg(metavar="RUN")] = None
    """A run whose weights and tokenizer to begin with."""
    profile: int = 0
    """Trace so many steps into the run's folder "profile"."""
    tensorboard: bool = False
    """Write TensorBoard events into the run's folder "tensorboard"."""
    kind: Annotated[tuple[str, ...], arg(metavar="LABEL=M:F")] = ()
    """Your own kinds of attention: LABEL=MODULE:FUNCTION."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Which weights, and how to search; what is not given is as the run's config says."""

    run: Path
    """Folder of the run."""
    step: Annotated[int | None, arg(metavar="N")] = None
    """Checkpoint; default: the best one."""
    beam: Annotated[int | None, arg(metavar="N")] = None
    """Hypotheses kept; 1: greedy."""
    penalty: Annotated[Literal["gnmt", "power"] | None, arg(metavar="gnmt|power")] = None
    """Length penalty: ((5 + L) / 6)^alpha, or L^alpha."""
    alpha: Annotated[float | None, arg(metavar="X")] = None
    """Exponent of the length normalisation."""
    kind: Annotated[tuple[str, ...], arg(metavar="LABEL=M:F")] = ()
    """The run's own kinds of attention: LABEL=MODULE:FUNCTION."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class Translate(Search):
    """Translate lines of text: one line out for each line in, in order.

    echo "The old teacher buys a new book." | transformer-jax translate --run=runs/quickstart
    """

    input: str = "-"
    """Text file (.gz too) to read; -: standard input."""
    output: str = "-"
    """Text file to write; -: standard output."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(Search):
    """Score translations: BLEU and chrF with their signatures, loss and perplexity.

    transformer-jax evaluate --run=runs/quickstart --data grammar:test
    """

    data: Annotated[tuple[str, ...], arg(metavar="CORPUS")] = ()
    """Corpora as in the config; default: those of the run."""
    language: Annotated[str | None, arg(metavar="CODE")] = None
    """Such as de: adds lower-cased, tokenised BLEU."""
    show: int = 0
    """Show so many translations of each."""
    json: bool = False
    """Print the scores as JSON."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """Average the weights of several checkpoints into a run of their own.

    transformer-jax average --run=runs/base --last 5 --out=runs/base-average
    """

    run: Path
    """Folder of the run."""
    out: Path
    """Folder of the new run."""
    last: int = 5
    """Average so many of the newest checkpoints."""
    steps: tuple[int, ...] = ()
    """Average these checkpoints instead."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show what a config or a run is: parameters, shapes, fill, compiled programs, memory.

    transformer-jax inspect --config=configs/quickstart.py
    """

    run: Path | None = None
    """Folder of a run; without it the config is inspected."""
    kind: Annotated[tuple[str, ...], arg(metavar="LABEL=M:F")] = ()
    """Your own kinds of attention: LABEL=MODULE:FUNCTION."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class BenchAttention:
    """Measure attention: time, memory and error of each kernel, and of PyTorch where installed.

    transformer-jax bench attention --lengths 256 1024 --kernels auto my_module:my_kernel
    """

    lengths: Annotated[tuple[int, ...], arg(metavar="T")] = (64, 256, 1024, 4096)
    """Queries, and as many keys."""
    batches: Annotated[tuple[int, ...], arg(metavar="B")] = (1, 8)
    """Sentences."""
    heads: Annotated[int, arg(metavar="N")] = 8
    """Heads of queries."""
    key_heads: Annotated[int | None, arg(metavar="G")] = None
    """Heads of keys and values; default: as many."""
    head_size: Annotated[int, arg(metavar="H")] = 64
    """Width of a head."""
    masks: Annotated[tuple[Literal["full", "causal"], ...], arg(metavar="full|causal")] = (
        "full",
        "causal",
    )
    """Which keys a query sees."""
    dtypes: Annotated[tuple[Literal["float32", "bfloat16"], ...], arg(metavar="TYPE")] = (
        "float32",
    )
    """float32, bfloat16."""
    kernels: Annotated[tuple[str, ...], arg(metavar="KERNEL")] = ()
    """Or MODULE:FUNCTION; default: all that can do all of it here."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write FILE.json and the plot FILE.svg."""
    dump: Annotated[Path | None, arg(metavar="DIR")] = None
    """Write the optimised HLO of every program."""
    debug: bool = False
    """Show the traceback of an error."""


COMMANDS: dict[str, type[Any]] = {
    "train": Train,
    "translate": Translate,
    "evaluate": Evaluate,
    "average": Average,
    "inspect": Inspect,
    "bench attention": BenchAttention,
}
