"""Translates sentences with the CTranslate2 model of this folder.

    pip install ctranslate2 sentencepiece
    python translate.py "A sentence." "Another one."

search.json holds arguments of `translate_batch`, and the limits of outputs: at most `max_ratio`
tokens for each source token and 10 more, and at most `max_length`. The model adds the end symbol to
sources. A source may have `max_length` tokens.
"""

import json
import sys
from pathlib import Path

import ctranslate2
import sentencepiece

folder = Path(__file__).parent
models = [str(folder / f"{side}.model") for side in ("source", "target")]
source, target = (sentencepiece.SentencePieceProcessor(model_file=model) for model in models)
translator = ctranslate2.Translator(str(folder), compute_type="float32")
search = json.loads((folder / "search.json").read_text("utf-8"))
ratio, longest = search.pop("max_ratio"), search.pop("max_length")
for sentence in sys.argv[1:]:
    pieces = source.encode(sentence, out_type=str)
    most = min(int(ratio * (len(pieces) + 1)) + 10, longest)
    (result,) = translator.translate_batch([pieces], max_decoding_length=most, **search)
    print(target.decode(result.hypotheses[0]))
