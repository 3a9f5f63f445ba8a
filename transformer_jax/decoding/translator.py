"""Translates text: tokenizes, batches by length, searches and restores the input order."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, overload

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from transformer_jax.config import Config, DecodeConfig
from transformer_jax.decoding import exported
from transformer_jax.decoding.exported import Exported
from transformer_jax.decoding.loop import Loop, Row, run
from transformer_jax.decoding.scoring import HeadSelection, Scorer
from transformer_jax.decoding.strategies import Lines, Phases, greatest_length, make_phases
from transformer_jax.decoding.trained import Member, TrainedModel, padded
from transformer_jax.errors import UserError, about
from transformer_jax.models.transformer import Model
from transformer_jax.parallel import processes
from transformer_jax.parallel.compile import DETERMINISTIC, REPLICATED, compile_function
from transformer_jax.parallel.mesh import DATA, replicate
from transformer_jax.parallel.program_cache import program_folder
from transformer_jax.special_ids import EOS, PAD, UNK
from transformer_jax.text.files import windows
from transformer_jax.text.sentences import split
from transformer_jax.text.tokenizer import Tokenizers
from transformer_jax.types import Params, unconstrained

THREADS = 2
"""Number of batches that a device searches at a time. Many operations of a step use one core, and
the other batch uses those that are free meanwhile."""

WINDOW = 4096
"""Number of lines that are sorted by length together. Longer input is translated in windows."""

CANDIDATES = tuple(512 * factor for factor in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))
"""Numbers of candidates of a batch, each of which is a compiled program."""

Done = Callable[[int], None]
"""Called again and again with the number of lines that have been translated since."""

Shortlist = Callable[[Sequence[int]], Int[np.ndarray, " C"]]
"""The ids of a source -> the target ids of which its translation may consist."""


class Hypothesis(NamedTuple):
    """A possible translation of a line."""

    text: str
    ids: tuple[int, ...]  # with the end symbol, unless truncated
    score: float  # the log probability with the length penalty
    log_prob: float  # the model's own, in nats
    attention: np.ndarray | None = None  # [T, S], if asked for; with the end symbols


class Translation(str):
    """The text of the best hypothesis for a line. It has all of them, best first."""

    hypotheses: tuple[Hypothesis, ...]
    source: str
    """The line."""
    parts: tuple[Translation, ...]
    """Those of the parts of a line that is longer than the model; else none."""

    def __new__(
        cls, hypotheses: Sequence[Hypothesis], source: str, parts: Sequence[Translation] = ()
    ) -> Translation:
        self = super().__new__(cls, hypotheses[0].text)
        self.hypotheses, self.source, self.parts = tuple(hypotheses), source, tuple(parts)
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:  # for copies and pickles
        return self.hypotheses, self.source, self.parts

    @classmethod
    def joined(cls, parts: Sequence[Translation], source: str) -> Translation:
        """Returns the translation of a line, whose n-th hypothesis consists of those of its parts.

        There is a space between two where there was one between the parts.
        """
        if len(parts) == 1:
            return cls(parts[0].hypotheses, source)
        hypotheses: list[Hypothesis] = []
        for several in zip(*(part.hypotheses for part in parts), strict=False):
            texts, ids, scores, log_probs, _ = zip(*several, strict=True)
            spaces = (" " * part.source[0].isspace() for part in parts)
            text = "".join(chain.from_iterable(zip(spaces, texts, strict=True))).strip()
            all_ids = tuple(chain.from_iterable(ids))
            hypotheses.append(Hypothesis(text, all_ids, sum(scores), sum(log_probs)))
        return cls(hypotheses, source, parts)

    @property
    def text(self) -> str:
        """The text of the best hypothesis."""
        return self.hypotheses[0].text

    @property
    def truncated(self) -> bool:
        """Whether the best hypothesis, or that of a part, stops at its greatest length."""
        return any(part.hypotheses[0].ids[-1:] not in ((), (EOS,)) for part in self.parts or [self])

    @property
    def score(self) -> float:
        """The score of the best hypothesis."""
        return self.hypotheses[0].score


class Translator(TrainedModel):
    """Translates lines of text with a trained model, or with an ensemble of several.

    Devices that hold all parameters search batches of their own; others share each batch.

    cancelled: is called before each program of a search, which raises Cancelled if it returns True.
    Each device then searches one batch at a time, so that equal calls have equal results to the
    last bit, and the devices of several processes share each batch, since all processes must make
    the same calls. Without it, several threads may use the translator. heads: the layers or heads
    of cross-attention whose mean weights each hypothesis has; None: hypotheses have none.
    UserError: the model has no such layer or head.
    """

    def __init__(
        self,
        config: Config,
        tokenizers: Tokenizers,
        params: Params,
        mesh: Mesh | None = None,
        cancelled: Callable[[], bool] | None = None,
        others: Sequence[Member] = (),
        heads: HeadSelection | None = None,
    ) -> None:
        super().__init__(config, tokenizers, params, mesh, others)
        self._cancelled, self._shortlist = cancelled, None
        self._use_phases()
        self._scorer = None if heads is None else Scorer(self, heads)

    def with_search(self, decode: DecodeConfig) -> Translator:
        """Returns a translator with another search, which shares the parameters."""
        if decode == self.config.decode:
            return self
        other = copy.copy(self)
        other.config = dataclasses.replace(self.config, decode=decode)
        other._use_phases()
        return other

    def with_shortlist(self, shortlist: Shortlist) -> Translator:
        """Returns a translator whose outputs consist of likely ids alone, which is faster."""
        other = copy.copy(self)
        other._shortlist = shortlist
        other._use_phases()
        return other

    @overload
    def __call__(self, lines: str) -> Translation: ...

    @overload
    def __call__(self, lines: list[str] | tuple[str, ...] | Iterator[str]) -> list[Translation]: ...

    def __call__(self, lines: str | Iterable[str]) -> Translation | list[Translation]:
        """Returns the translation of a line, or of each of several in order.

        That of a blank line is blank.
        """
        if isinstance(lines, str):
            return self.translate([lines])[0]
        return list(self.stream(lines))

    def stream(
        self,
        lines: Iterable[str],
        prefixes: Iterable[str] | None = None,
        phrases: Iterable[Sequence[str]] | None = None,
        *,
        first: int = 1,
        done: Done = lambda count: None,
    ) -> Iterator[Translation]:
        """Yields the translations of `lines` in order, reading up to `WINDOW` lines at a time.

        If no line arrives for a while, those that have arrived are translated, so that a pipe may
        wait for a translation before it sends the next line. Lines are read in a thread. Of several
        processes, the coordinator alone reads, and all translate its lines.

        Each translation has `decode.n_best` hypotheses, or fewer if the search finds fewer.
        prefixes: how the translation of each line begins. phrases: what that of each line holds.
        first and done: as in `translate`.

        UserError: there are more lines than prefixes or phrases, or they do not fit.
        """
        inputs = [None if each is None else iter(each) for each in (prefixes, phrases)]

        def read() -> Iterator[list[Any]]:
            for window in windows(lines, WINDOW):
                count = len(window)
                more = (None if i is None else list(itertools.islice(i, count)) for i in inputs)
                yield [window, *more]

        for window, *constraints in processes.stream(read()):
            yield from self.translate(window, *constraints, first=first, done=done)
            first += len(window)

    def translate(
        self,
        lines: Sequence[str],
        prefixes: Sequence[str] | None = None,
        phrases: Sequence[Sequence[str]] | None = None,
        *,
        first: int = 1,
        done: Done = lambda count: None,
    ) -> list[Translation]:
        """Returns the translations of one window of lines, as `stream` yields them.

        A line that is longer than the model is translated in parts (`decode.truncate`).
        first: number of the first line, for messages and for samples. done: called again and again
        with the number of lines that have been translated since, in any thread.
        """
        for name, values in (("prefix", prefixes), ("phrases", phrases)):
            if values is not None and len(values) < len(lines):
                raise UserError(
                    f"line {first + len(values)}: has no {name}; give one, or a blank line, each"
                )
        parts = [self._split(line) for line in lines]
        requests: list[_Request] = []
        for i, (begin, *rest) in enumerate(parts):
            constraints = prefixes[i] if prefixes else "", phrases[i] if phrases else ()
            requests.append(self._request(begin, first + i, *constraints))
            if rest and requests[-1].phrases:
                raise UserError(f"line {first + i}: is too long for phrases; give it as several")
            requests += [self._request(each, first + i)._replace(lines=0) for each in rest]
        results = list(map(_holding, requests, self._search(requests, done)))
        if self._scorer is not None:
            results = self._with_attention(self._scorer, requests, results)
        each = map(Translation, results, chain.from_iterable(parts))
        return [
            Translation.joined(list(itertools.islice(each, len(of_line))), line)
            for of_line, line in zip(parts, lines, strict=True)
        ]

    def _split(self, line: str) -> list[str]:
        """Returns the parts of a line that are translated: one, unless it is too long."""
        if self.config.decode.truncate or self.model.config.labels is not None:
            return [line]
        encode, limit = self.tokenizers.source.encode, self.max_length
        parts = split(line, lambda text: len(encode(text)) < limit)
        return [part for part in parts if part.strip()] or [line]

    def _search(self, requests: Sequence[_Request], done: Done) -> list[list[Hypothesis]]:
        """Returns the hypotheses of each line of a window."""
        results = [[Hypothesis("", (), 0.0, 0.0)]] * len(requests)
        decode = self.config.decode
        done(sum(request.lines for request in requests if not request.source))

        lengths, tokens = [len(request.source) for request in requests], decode.batch_tokens
        batches = list(self.batches(lengths, tokens // decode.hypotheses, shared=not self._apart))
        # Batches are ordered by length, so that equal numbers of them are equal work.
        pairs = [(searcher, batches[searcher.share]) for searcher in self._searchers()]
        loops = [self._loop(*pair, requests, done) for pair in pairs]
        found: dict[int, Row] = {}
        for loop, (_, share), searched in zip(loops, pairs, run(loops), strict=True):
            for (_, members), lines, rows in zip(share, loop.batches, searched, strict=True):
                for index, (ids, *numbers) in zip(members, rows, strict=False):
                    ids = ids if lines.candidates is None else lines.candidates[ids]
                    found[index] = [ids, *numbers]
        if self._apart and processes.this_process()[1] > 1:
            here, found = found.keys(), _of_all_processes(found, decode.n_best)
            done(sum(requests[index].lines for index in found.keys() - here))
        for index, row in found.items():
            results[index] = self._hypotheses(row)
        self.compiling += max(loop.compiling for loop in loops)
        return results

    @property
    def _apart(self) -> bool:
        """Whether each device searches batches of its own."""
        asks_others = self._cancelled is not None and processes.this_process()[1] > 1
        return self.mesh.size == self.mesh.shape[DATA] and not asks_others

    def _searchers(self) -> Iterator[_Searcher]:
        """Yields what searches in this process."""
        if not self._apart:
            yield _Searcher(self.all_params)
            return
        params = replicate(self.all_params, self.mesh)
        for index, device in enumerate(self.mesh.devices.flat):
            if device in self.mesh.local_devices:
                copies = jax.tree.map(partial(_on, device), params)
                yield _Searcher(copies, slice(index, None, self.mesh.size), device)

    def _loop(
        self,
        searcher: _Searcher,
        batches: Sequence[tuple[tuple[int, int], list[int]]],
        requests: Sequence[_Request],
        done: Done,
    ) -> Loop:
        """Returns the search of batches, which are shapes and indices of the requests in them."""

        def done_with(batch: int, row: int) -> None:
            members = batches[batch][1]
            done(requests[members[row]].lines if row < len(members) else 0)  # a row of padding

        return Loop(
            self._phases,
            searcher.params,
            [self._lines([requests[i] for i in members], shape) for shape, members in batches],
            threads=THREADS if self._apart and self._cancelled is None else 1,
            # Merged sentences would need the candidates of all.
            merge=self._apart and self._shortlist is None,
            done=done_with,
            cancelled=self._cancelled or (lambda: False),
            compiled=self._compiled[searcher.device],
        )

    def _lines(self, requests: Sequence[_Request], shape: tuple[int, int]) -> Lines:
        """Returns a batch of requests on the devices; prefixes and phrases have few shapes, too."""
        lines = Lines(source=padded([request.source for request in requests], shape))
        if self.config.decode.sample:
            numbers = np.zeros(shape[0], np.int32)
            numbers[: len(requests)] = [request.number for request in requests]
            lines = lines._replace(numbers=numbers)
        if self._shortlist is not None:
            lines, requests = self._among_candidates(lines, requests, self._shortlist)
        if any(request.prefix for request in requests):
            prefixes = [request.prefix for request in requests]
            longest = _power_of_two(max(map(len, prefixes)))
            lines = lines._replace(prefix=padded(prefixes, (shape[0], longest)))
        if any(request.phrases for request in requests):
            phrases = [request.phrases for request in requests]
            most = _power_of_two(max(map(len, phrases)))
            longest = _power_of_two(max(len(ids) for row in phrases for ids in row))
            array = np.full((shape[0], most, longest), PAD, np.int32)
            for row, of_line in enumerate(phrases):
                array[row] = padded(of_line, (most, longest))
            lines = lines._replace(phrases=array)
        if self._apart:
            return lines
        # All devices and processes have the same candidates, which are no rows.
        on_mesh = self.on_mesh(lines._replace(candidates=None))
        return on_mesh._replace(candidates=lines.candidates)

    def _among_candidates(
        self, lines: Lines, requests: Sequence[_Request], shortlist: Shortlist
    ) -> tuple[Lines, list[_Request]]:
        """Returns a batch with the candidates of its sentences, and the requests with their
        indices in place of ids."""
        each: list[np.ndarray] = []
        for request in requests:
            own = np.setdiff1d(shortlist(request.source), self._suppressed)
            # Special ids are their own indices.
            given = chain(range(UNK + 1), request.prefix, *request.phrases)
            each.append(np.union1d(own, np.fromiter(given, np.int32)))
        union = np.unique(np.concatenate(each)).astype(np.int32)
        size = next((size for size in CANDIDATES if size >= len(union)), len(union))
        allowed = np.ones((len(lines.source), size), bool)
        allowed[: len(each)] = False
        for row, ids in enumerate(each):
            allowed[row, np.searchsorted(union, ids)] = True

        def index(ids: list[int]) -> list[int]:
            return np.searchsorted(union, ids).tolist()

        requests = [
            request._replace(prefix=index(request.prefix), phrases=[*map(index, request.phrases)])
            for request in requests
        ]
        candidates = np.pad(union, (0, size - len(union)))
        return lines._replace(candidates=candidates, allowed=allowed), requests

    def _hypotheses(self, found: Row) -> list[Hypothesis]:
        """Returns the hypotheses of one sentence, without those that the search left empty."""
        hypotheses: list[Hypothesis] = []
        for row, *numbers in zip(*(array.tolist() for array in found), strict=True):
            if hypotheses and numbers[0] == -np.inf:
                break
            end = row.index(EOS) + 1 if EOS in row else len(row)
            tokens = tuple(i for i in row[:end] if i != PAD)
            text = self.tokenizers.target.decode([i for i in tokens if i != EOS])
            hypotheses.append(Hypothesis(text, tokens, *numbers))
        return hypotheses

    def _with_attention(
        self, scorer: Scorer, requests: Sequence[_Request], results: Sequence[Sequence[Hypothesis]]
    ) -> list[list[Hypothesis]]:
        """Returns the hypotheses with the attention of a pass over their ids."""
        rows = zip(requests, results, strict=True)
        pairs = [(request.source, h.ids) for request, row in rows for h in row]
        scores = iter(scorer.of_ids(pairs, self.all_params))
        return [[h._replace(attention=next(scores).attention) for h in row] for row in results]

    def _use_phases(self) -> None:
        """Makes the programs of the search, which are compiled when they are first called."""
        config = self.config
        options = DETERMINISTIC if config.execution.deterministic else None
        suppressed = [self.tokenizers.target.find(piece) for piece in config.decode.suppress]
        if EOS in suppressed:
            raise UserError(
                "decode.suppress: must not hold the end symbol </s>, which ends outputs"
            )
        below = config.decode.min_length < self.max_length
        config.decode.require(below, "min_length", f"below model.max_length={self.max_length}")
        self._suppressed = suppressed
        if self._shortlist is not None:  # which leaves out the others; special ids keep their place
            suppressed = [id for id in suppressed if id <= UNK]
        # Each process reads which sentences are done, and the ids.
        models, shardings = self.models, (None, REPLICATED, REPLICATED)
        compiled = partial(compile_function, mesh=self.mesh, options=options)
        if self._apart:
            alone = partial(Model.clone, kernel="auto", constrain=unconstrained)
            models, shardings = [*map(alone, models)], None
            if exported.enabled and (folder := program_folder()) is not None:
                configs = [model.config for model in models]
                about = repr((configs, self.tokenizers.sizes, config.decode, suppressed))
                kept = {"folder": folder, "about": about}
                compiled = partial(Exported, mesh=self.mesh, options=options, **kept)
        phases = make_phases(models, config.decode, suppressed)
        self._phases = Phases(
            compiled(phases.prefill, result=None),
            compiled(phases.decode, result=shardings, donate=(1,)),
            compiled(phases.grow, result=None),
        )
        self._compiled = defaultdict[Any, set[Any]](set)  # by device
        self.compiling = 0.0
        """Seconds by which the compilation of programs has delayed translations."""

    def _request(
        self, line: str, number: int, prefix: str = "", phrases: Sequence[str] = ()
    ) -> _Request:
        """Returns a line, the prefix of its output and the phrases in it as ids.

        UserError: with the end symbol, the prefix or the phrases are longer than the output may be;
        outputs with phrases are sampled, or the beam is too small for them.
        """
        if isinstance(phrases, str):
            raise UserError(f"line {number}: its phrases are a text; give a list of texts")
        encode, source = self.tokenizers.target.encode, self.encode(line, number)
        request = _Request(source, encode(prefix), _without_contained(map(encode, phrases)), number)
        decode, held = self.config.decode, sum(map(len, request.phrases))
        if held and decode.sample:
            raise UserError(f"line {number}: has phrases, which samples cannot hold; search")
        most = greatest_length(self.models, decode, len(source)) if source else 0
        for what, count in (("prefix has", len(request.prefix)), ("phrases have", held)):
            if count and count >= most:
                wanted = f"below the greatest length of its output, {most}"
                raise UserError(f"line {number}: its {what} {count} tokens; must be {wanted}")
        want = f"at least {held + 1}, one more than the tokens of its phrases"
        with about(f"line {number}"):
            decode.require(not held or decode.beam > held, "beam", want)
        return request


class _Searcher(NamedTuple):
    """A device that searches batches of its own, or all devices together."""

    params: Sequence[Params]  # of each model, on the device
    share: slice = slice(None)  # its batches of all
    device: Any = None


def _on(device: Any, x: Array) -> Array:
    """Returns the copy of a replicated array on a device, which is not moved."""
    return next(shard.data for shard in x.addressable_shards if shard.device == device)


def _of_all_processes(found: dict[int, Row], count: int) -> dict[int, Row]:
    """Returns the `count` hypotheses of lines that any process has found, by the lines' indices."""
    length = processes.maximum(max((row[0].shape[1] for row in found.values()), default=0))
    ids = np.full((len(found), count, length), PAD, np.int32)
    numbers = np.zeros((len(found), 2, count), np.float32)
    for i, (of_line, *scores) in enumerate(found.values()):
        ids[i, :, : of_line.shape[1]] = of_line
        numbers[i] = scores
    indices = processes.gather(np.fromiter(found, np.int32))
    rows = zip(processes.gather(ids), processes.gather(numbers), strict=True)
    return {int(i): [of_line, *scores] for i, (of_line, scores) in zip(indices, rows, strict=True)}


class _Request(NamedTuple):
    """A line to translate, or a part of one, as ids."""

    source: list[int]
    prefix: list[int]
    phrases: list[list[int]]
    number: int  # of the line
    lines: int = 1  # that it stands for; 0: a further part of a line


def _without_contained(phrases: Iterable[list[int]]) -> list[list[int]]:
    """Returns the phrases that no other one contains, the longest first: an output that holds these
    holds all of them."""
    ordered = sorted(filter(None, phrases), key=len, reverse=True)
    return [p for i, p in enumerate(ordered) if not any(_contains(ids, p) for ids in ordered[:i])]


def _contains(ids: Sequence[int], phrase: Sequence[int]) -> bool:
    size = len(phrase)
    return any([*ids[i : i + size]] == phrase for i in range(len(ids)))


def _holding(request: _Request, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Returns the hypotheses that hold the phrases of a line. UserError: none does."""
    kept = [h for h in hypotheses if all(_contains(h.ids, each) for each in request.phrases)]
    if request.source and not kept:
        raise UserError(
            f"line {request.number}: no output holds its phrases after its prefix, with decode."
            "max_length, max_ratio, suppress and no_repeat_ngrams; change these, or leave some out"
        )
    return kept or hypotheses


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
