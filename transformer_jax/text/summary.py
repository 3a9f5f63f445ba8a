"""Summarizes training text: how well the tokenizers fit it, and which of its pairs recur."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from transformer_jax.text.corpus import Corpora, Corpus, Pair
from transformer_jax.text.tokenizer import Tokenizer, Tokenizers

SAMPLE = 10_000
"""Number of pairs of which tokens are counted."""

REMEMBERED = 1_000_000
"""Number of pairs among which equal ones are counted: their hashes are in memory."""

QUICK = 100_000
"""Number of pairs that are read where a summary must not take long."""


def summarize(corpora: Corpora, tokenizers: Tokenizers, limit: int | None = QUICK) -> list[str]:
    """Returns lines on the first `limit` pairs to train on, as many of each corpus; None: on all.

    They say how well the tokenizers fit the text, how many pairs equal an earlier one, and how many
    pairs of each development corpus are in the training text, too. Equal texts have the same
    characters. UserError: a corpus cannot be read.
    """
    sample = zip(*_first(corpora.train, SAMPLE), strict=True)
    sides = zip(("source", "target"), tokenizers, sample, strict=True)
    lines = [f"{name} text: {_fit(tokenizer, texts)}" for name, tokenizer, texts in sides]
    dev = {corpus.name: list(corpus.pairs()) for corpus in corpora.dev}
    wanted = {part for pair in chain.from_iterable(dev.values()) for part in (pair, pair[0])}
    count, hashes, common = 0, set[int](), set[Pair | str]()
    for count, pair in enumerate(_first(corpora.train, limit), 1):
        common |= wanted & {pair, pair[0]}
        if count <= REMEMBERED:
            hashes.add(hash(pair))
    equal = min(count, REMEMBERED) - len(hashes)
    lines.append(f"training text: {count:,} pairs read, of which {equal:,} equal an earlier one")
    for name, pairs in dev.items():
        both = sum(pair in common for pair in pairs)
        alone = sum(source in common for source, _ in pairs)
        lines.append(f"{name}: {both:,} pairs and {alone:,} sources are in the training text, too")
    return lines


def _first(corpora: Sequence[Corpus], count: int | None) -> Iterator[Pair]:
    """Returns the first pairs, in all about `count`; None: all pairs."""
    each = None if count is None else -(-count // len(corpora))
    return chain.from_iterable(islice(corpus.pairs(), each) for corpus in corpora)


def _fit(tokenizer: Tokenizer, texts: Sequence[str]) -> str:
    """Returns the number of tokens a word, and the share of tokens that stand for characters
    without a piece of their own."""
    ids, _ = tokenizer.encode_all(texts)
    tokens = len(ids) / max(sum(len(text.split()) for text in texts), 1)
    return f"{tokens:.2f} tokens a word, {tokenizer.uncovered(ids):.2%} of them bytes or unknown"
