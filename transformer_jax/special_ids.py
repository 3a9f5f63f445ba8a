"""The special ids, which are the same in every vocabulary.

A SentencePiece model made elsewhere may number them differently; `text.tokenizer` translates.
"""

from typing import Final

PAD: Final = 0
"""Padding: empty slots of a batch. The decoder reads it first where `model.decoder_start_id` is
None."""

BOS: Final = 1
"""Begins a sentence. The decoder reads it first, unless `model.decoder_start_id` says otherwise."""

EOS: Final = 2
"""Ends a sentence."""

UNK: Final = 3
"""Stands for text that the vocabulary cannot express."""
