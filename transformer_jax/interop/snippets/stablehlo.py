"""Translates sentences with the StableHLO programs of this folder, by greedy search.

    pip install jax flatbuffers sentencepiece
    python translate.py "A sentence." "Another one."

`params` are the arrays of params.npz in their order. Ids are int32: 0 pads rows, 1 begins an output
unless the model says otherwise, 2 ends each sentence, 3 stands for what is unknown; the tokenizer's
other pieces follow in their order.

    encode  (params, source [B, S]) -> state, a list of arrays
    step    (params, ids [B, 1], index [], state) -> logits [B, V] in float32, state
    greedy  (params, source [B, S]) -> ids [B, T]
"""

import sys
from pathlib import Path

import numpy as np
import sentencepiece
from jax import export

PAD, BOS, EOS, UNK = range(4)
folder = Path(__file__).parent
models = [str(folder / f"{side}.model") for side in ("source", "target")]
source, target = (sentencepiece.SentencePieceProcessor(model_file=model) for model in models)


def pieces(side: sentencepiece.SentencePieceProcessor) -> list[int]:
    """Returns the tokenizer's number of each id."""
    special = [side.pad_id(), side.bos_id(), side.eos_id(), side.unk_id()]
    return special + [i for i in range(side.get_piece_size()) if i not in special]


with np.load(folder / "params.npz") as arrays:
    params = [arrays[name] for name in arrays.files]
greedy = export.deserialize(bytearray((folder / "greedy.jax").read_bytes())).call
for sentence in sys.argv[1:]:
    ids = [pieces(source).index(i) for i in source.encode(sentence)]
    outputs = np.asarray(greedy(params, np.array([[*ids, EOS]], np.int32)))[0].tolist()
    print(target.decode([pieces(target)[i] for i in outputs if i not in (PAD, BOS, EOS)]))
