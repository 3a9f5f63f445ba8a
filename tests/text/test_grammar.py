"""The built-in corpus: the same everywhere, one translation for each sentence, what splits hold."""

import subprocess
import sys

import pytest

from transformer_jax.text.corpora import grammar

SPLITS = ("train", "validation", "test_seen", "test_new")
DIGEST = "ba2cbed0b92cfaf6a9e658e5874015238519fd5e32b06a0f24f5c6a5a46e84b7"
"""SHA-256 of all pairs: results that were measured on the corpus hold for this one only."""


def test_unknown_split_is_one_line_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"^split 'dev': must be one of train, .*test_new.*$"):
        grammar.load("dev")


def test_corpus_is_the_same_in_every_process() -> None:
    program = (
        "import hashlib; from transformer_jax.text.corpora import grammar\n"
        f"pairs = [grammar.load(split) for split in {SPLITS}]\n"
        "text = ''.join(f'{s}\\t{t}\\n' for split in pairs for s, t in split)\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert result.stdout.decode().strip() == DIGEST
