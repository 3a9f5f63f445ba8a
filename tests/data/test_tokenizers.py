"""The cache of trained tokenizers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from corpus_files import text_pair

from transformer_jax.config import Config, DataConfig, TokenizerConfig
from transformer_jax.data import tokenizers
from transformer_jax.data.tokenizers import tokenizers_of
from transformer_jax.errors import UserError
from transformer_jax.text import tokenizer
from transformer_jax.text.corpus import Corpus
from transformer_jax.text.tokenizer import Tokenizers

PAIRS = [(f"the {i % 7} dogs of number {i}", f"{i} rebmun fo sgod") for i in range(300)]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(text_pair(tmp_path, PAIRS))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    options = TokenizerConfig(vocabulary=300)
    return Config(tokenizer=options, data=DataConfig(cache=str(tmp_path / "cache")))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TokenizerConfig]:
    """The configs of all calls of `tokenizer.train`."""
    calls: list[TokenizerConfig] = []
    train = tokenizer.train

    def counted(pairs: Any, config: TokenizerConfig, seed: int = 0) -> Tokenizers:
        calls.append(config)
        return train(pairs, config, seed)

    monkeypatch.setattr(tokenizer, "train", counted)
    return calls


@pytest.mark.parametrize("joint", [True, False])
def test_tokenizers_are_trained_once(
    joint: bool, corpus: Corpus, config: Config, trained: list[TokenizerConfig]
) -> None:
    options = replace(config.tokenizer, joint=joint, vocabulary=300 if joint else 285)
    model = replace(config.model, tied="all" if joint else "decoder")
    config = replace(config, tokenizer=options, model=model)
    first, again = (tokenizers_of([corpus], config) for _ in range(2))
    assert [each.model for each in first] == [each.model for each in again]
    assert (again.source is again.target) == joint
    assert trained == [options]
    tokenizers_of([corpus], replace(config, tokenizer=replace(options, sampling=0.1)))
    assert len(trained) == 1  # sampling is done later


def test_other_tokenizers_are_trained_anew(
    tmp_path: Path, corpus: Corpus, config: Config, trained: list[TokenizerConfig]
) -> None:
    other = replace(config, tokenizer=TokenizerConfig(vocabulary=290))
    assert [tokenizers_of([corpus], each).source.size for each in (config, other)] == [300, 290]
    text_pair(tmp_path, PAIRS[:-1])
    tokenizers_of([Corpus(corpus.name)], config)
    assert len(trained) == 3


@pytest.mark.parametrize("damage", [b"", b"[]", b"{}", b"[1]", b'[{"digest": "0", "model": "AA"}]'])
def test_a_damaged_entry_is_replaced(
    damage: bytes, corpus: Corpus, config: Config, trained: list[TokenizerConfig]
) -> None:
    first = tokenizers_of([corpus], config)
    (entry,) = Path(config.data.cache).iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage)
    assert tokenizers_of([corpus], config).source.digest == first.source.digest
    assert entry.read_bytes() == whole
    entry.write_bytes(whole.replace(first.source.digest.encode(), b"0" * 64))
    tokenizers_of([corpus], config)
    assert len(trained) == 3


def test_only_process_0_writes_the_cache(corpus: Corpus, config: Config, tmp_path: Path) -> None:
    tokenizers_of([corpus], config, process_index=1)
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_named_before_training(
    corpus: Corpus, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(config.data.cache).write_text("a file")
    monkeypatch.setattr(tokenizer, "train", pytest.fail)
    with pytest.raises(UserError, match=r"data\.cache: .* while writing to"):
        tokenizers_of([corpus], config)
    assert tokenizers._read(Path(config.data.cache)) is None
