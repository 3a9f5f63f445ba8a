"""The commands and their options. Docstrings are the help that users read.

To add a command, write its options here, and add them to `COMMANDS` with the function of a module
in this package that runs it. The module is imported when the command runs, so that `--help` needs
no JAX.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, UseAppendAction, arg

from transformer_jax.benchmark.settings import AttentionBenchmark
from transformer_jax.errors import UserError


def several(metavar: str, **more: Any) -> Any:
    """Describes an option of several values; its default, none, is not shown."""
    return arg(metavar=metavar, help_behavior_hint="", **more)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every command."""

    takes_config: ClassVar[bool] = False
    """Whether the command takes `--config` and `--config.FIELD`."""
    short: ClassVar[tuple[str, ...]] = ()
    """Fields of the config, such as "decode.alpha", that can also be set as `--alpha`."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Options of every command that builds a model."""

    modules: Annotated[tuple[str, ...], several("MODULE", name="import")] = ()
    """Modules of your own to import."""


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
    Any field of the config can follow: --config.model.layers=4 (all of them: --help-config).

    transformer-jax train --config=configs/quickstart.py --run=runs/quickstart
    """

    takes_config = True

    run: Annotated[str, arg(metavar="PATH")]
    """Folder of the run, new or to continue."""
    new: bool = False
    """Refuse to continue a run."""
    init_from: Annotated[str | None, arg(metavar="RUN")] = None
    """Run whose parameters to start with."""
    init_parts: Annotated[tuple[str, ...], several("PART")] = ()
    """Which of them, such as encoder; default: all."""
    new_vocabulary: bool = False
    """Make another tokenizer than its own."""
    from_card: Annotated[str | None, several("FILE")] = None
    """Result whose run to train again; FILE#ROW: of a row."""
    any_versions: bool = False
    """Accept other versions than the card's."""
    profile: int = 0
    """Number of steps to trace into RUN/profile."""
    tensorboard: bool = False
    """Write events into RUN/tensorboard."""
    reporter: Annotated[str | None, several("NAME")] = None
    """Function MODULE:FUNCTION to call with each record."""
    metric: Annotated[str | None, several("NAME")] = None
    """Function MODULE:FUNCTION that scores in place of BLEU."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions(ProcessOptions, ModelOptions):
    """Options of every command that loads trained models, with the search of the run's config."""

    takes_config = True

    run: Annotated[tuple[str, ...], arg(metavar="PATH"), UseAppendAction] = ()
    """Folder of the run; several: an ensemble."""
    step: Annotated[int | None, arg(metavar="N")] = None
    """Checkpoint; default: the best one."""
    mesh: Annotated[tuple[str, ...], several("AXIS=N")] = ()
    """Mesh of devices, such as fsdp=4."""

    def __post_init__(self) -> None:
        if not self.run:
            raise UserError("--run: must be given: the folder of a run")


@dataclass(frozen=True, kw_only=True)
class Translate(SearchOptions):
    """Translate lines of text: one output line for each input line, in order.

    echo "The old book." | transformer-jax translate --run=runs/quickstart
    """

    short = ("decode.alpha", "decode.penalty", "decode.n-best")

    beam: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Beam size; also --n-best, --penalty, --alpha."""
    input: str = "-"
    """Text file; -: standard input."""
    output: str = "-"
    """Text file to write; -: standard output."""
    prefix: Annotated[str | None, arg(metavar="FILE")] = None
    """Text file of how each output begins."""
    phrases: Annotated[str | None, arg(metavar="FILE")] = None
    """Phrases of each output, tabs between."""
    shortlist: Annotated[str | None, arg(metavar="FILE")] = None
    """Marian's likely targets: lex.*.bin."""
    truncate: bool = False
    """Cut lines too long for the model."""
    align: Annotated[tuple[str, ...], several("LAYER")] = ()
    """What aligns words, or all; needs --json."""
    json: bool = False
    """Write a JSON object for each line."""


@dataclass(frozen=True, kw_only=True)
class BackTranslate(SearchOptions):
    """Make training pairs from target text, with a model of the other direction.

    transformer-jax back-translate --run=runs/de_en --text=x.de --pairs=a.en,a.de --output=x.tsv
    """

    text: Annotated[str, arg(metavar="FILE")]
    """Text in the target language; -: standard input."""
    pairs: Annotated[str, arg(metavar="CORPUS")]
    """Pairs that tell the direction."""
    output: Annotated[str, arg(metavar="FILE")]
    """Pairs to write: source, tab, target."""


@dataclass(frozen=True, kw_only=True)
class PairOptions(SearchOptions):
    """Options of every command that reads pairs of lines with a trained model."""

    data: Annotated[tuple[str, ...], several("CORPUS")] = ()
    """Corpora; default: the run's data.dev."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(PairOptions):
    """Score translations: BLEU and chrF with their signatures, loss and perplexity.
    $ transformer-jax evaluate --run=runs/quickstart --data grammar:test
    """

    short = ("decode.penalty", "train.tokenize")

    language: Annotated[str | None, arg(metavar="CODE")] = None
    """Adds tokenized BLEU; also --tokenize."""
    beam: Annotated[str | None, arg(metavar="N,...")] = None
    """Beam sizes; others: --config.decode."""
    alpha: Annotated[str | None, arg(metavar="X,...")] = None
    """Exponents of the length penalty."""
    baseline: Annotated[str | None, arg(metavar="FILE")] = None
    """Translations to compare with."""
    references: Annotated[tuple[str, ...], several("FILE")] = ()
    """Texts of further references."""
    output: Annotated[str | None, arg(metavar="FILE")] = None
    """Text file of the translations to write."""
    show: int = 0
    """Number of translations to show."""
    worst: int = 0
    """Number of worst and of best ones to show."""
    json: bool = False
    """Print the scores as JSON."""


@dataclass(frozen=True, kw_only=True)
class Score(PairOptions):
    """Print the log probability of each target given its source, and the perplexity of all.

    transformer-jax score --run=runs/quickstart --data test.en,test.de
    """

    json: bool = False
    """Write a JSON object for each pair, with its tokens."""


@dataclass(frozen=True, kw_only=True)
class Align(PairOptions):
    """Align the words of pairs by cross-attention: a line such as 0-0 2-1 1-2 for each.

    transformer-jax align --run=runs/quickstart --data test.en,test.de --layer 2
    """

    layer: Annotated[tuple[str, ...], several("LAYER[.HEAD]")] = ()
    """Layers or heads to average; default: all."""
    pieces: bool = False
    """Align the pieces of words."""


@dataclass(frozen=True, kw_only=True)
class Attention(SearchOptions):
    """Show how a model attends to a sentence and its translation: an HTML page, or a picture.

    transformer-jax attention --run=runs/quickstart -o view.html "The old teacher buys a book."
    """

    sentence: Annotated[str, Positional]
    """Text of the source."""
    target: Annotated[str | None, arg(metavar="TEXT")] = None
    """Its translation; else the model's."""
    output: Annotated[str, arg(metavar="FILE", aliases=["-o"])]
    """HTML page, or picture (.svg, .png, .pdf)."""
    attention: Annotated[str | None, arg(metavar="NAME")] = None
    """encoder, decoder; default: cross."""
    layer: Annotated[str | None, arg(metavar="LAYER[.HEAD]")] = None
    """From 0; default: the last."""


@dataclass(frozen=True, kw_only=True)
class Plot(Options):
    """Plot the training of runs, or a result file.

    transformer-jax plot --output=curves.svg runs/quickstart runs/mine
    """

    sources: Annotated[tuple[str, ...], Positional, several("RUN|FILE")]
    """Runs, or results/NAME.json."""
    output: Annotated[str, arg(metavar="FILE", aliases=["-o"])]
    """Picture to write: .svg, .png or .pdf."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("plot: name a run, or a result file")


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
    steps: Annotated[tuple[int, ...], several("STEP")] = ()
    """Steps of the checkpoints, instead of the newest."""


@dataclass(frozen=True, kw_only=True)
class Import(Options):
    """Make a run of a model that was trained elsewhere: of Marian, Firefox or Hugging Face.

    transformer-jax import --run=runs/enpt downloads/enpt
    """

    source: Annotated[str, Positional, arg(metavar="PATH")]
    """Folder of the model with its vocabularies, or the model's file."""
    run: Annotated[str, arg(metavar="PATH")]
    """Folder of the new run."""


@dataclass(frozen=True, kw_only=True)
class Export(ModelOptions):
    """Write a trained model in another format.

    transformer-jax export --run=runs/quickstart --format ctranslate2 --out=quickstart-ct2
    """

    run: Annotated[str, arg(metavar="PATH")]
    """Folder of the run."""
    format: Literal["ctranslate2", "huggingface", "int8", "stablehlo"]
    """A folder of CTranslate2 or of transformers (MarianMT), a run, or programs."""
    out: Annotated[str, arg(metavar="PATH")]
    """Folder to write, which must not exist."""
    step: Annotated[int | None, arg(metavar="N")] = None
    """Checkpoint; default: the best one."""


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
    device_memory: Annotated[str | None, arg(metavar="SIZE")] = None
    """Memory of each device, such as 80GiB; default: that of the devices."""
    length: Annotated[int | None, arg(metavar="N")] = None
    """Plan batches of N tokens a side, and read no corpora."""
    compile: bool = False
    """Compile the steps, for the exact memory and the time that this takes."""
    json: bool = False
    """Print the whole config as JSON, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class Check(ModelOptions):
    """Check a config, its data and code of your own on a small model; status 1 if a check fails.

    transformer-jax check --config=my_config.py --import my_attention
    """

    takes_config = True

    run: Annotated[str | None, arg(metavar="PATH")] = None
    """Folder of a run, whose config and tokenizer to check."""


@dataclass(frozen=True, kw_only=True)
class BenchAttention(AttentionBenchmark, Options):
    """Compare kernels of attention, and PyTorch's if installed, by time, memory and error.

    transformer-jax bench attention --lengths 256 1024 --kernels auto my_module:my_kernel
    """

    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write FILE.json and the plot FILE.svg."""
    dump: Annotated[Path | None, arg(metavar="DIR")] = None
    """Write the optimized HLO of every program."""


@dataclass(frozen=True, kw_only=True)
class BenchTrain(ModelOptions):
    """Measure a training step by part, beside its matmuls alone, and PyTorch's if installed.

    transformer-jax bench train --preset small --rows 128 --length 32
    """

    takes_config = True

    preset: Literal["tiny", "small", "base", "big"] | None = None
    """Model, in place of --config."""
    rows: Annotated[int, arg(metavar="N")] = 128
    """Rows of a batch of random ids."""
    length: Annotated[int, arg(metavar="N")] = 32
    """Ids of each row, on both sides."""
    text: Annotated[int | None, arg(metavar="N")] = None
    """Measure N batches of data.train, instead."""
    samples: Annotated[int, arg(metavar="N")] = 5
    """Turns in which each is timed."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write FILE.json."""


COMMANDS: dict[str, tuple[type[Options], str]] = {
    "train": (Train, "train:run"),
    "translate": (Translate, "translate:translate"),
    "back-translate": (BackTranslate, "translate:back_translate"),
    "evaluate": (Evaluate, "evaluate:run"),
    "score": (Score, "translate:score"),
    "align": (Align, "translate:align"),
    "attention": (Attention, "pictures:attention"),
    "plot": (Plot, "pictures:plot"),
    "average": (Average, "export:average"),
    "import": (Import, "import_model:run"),
    "export": (Export, "export:export"),
    "inspect": (Inspect, "inspect:run"),
    "check": (Check, "check:run"),
    "bench attention": (BenchAttention, "bench_attention:run"),
    "bench train": (BenchTrain, "bench_train:run"),
}
"""By command its options, and what runs it, as MODULE:FUNCTION of this package. It is called with
the options and, if the command takes them, the arguments of the config."""
