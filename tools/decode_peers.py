"""Decodes with CTranslate2 or Hugging Face for `tools.decode`, in an environment of its own.

    python tools/decode_peers.py PEER DATA.json

PEER is one of `PEERS`, and DATA.json what `prepare` there has written. It reads calls of the peer's
methods from standard input and writes what they return, and the seconds that they take, to standard
output; both are lines of JSON. Needs none of this project's packages.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

GROUP = 100
"""Number of sentences of similar length whose outputs have the same length."""


def batches(rows: Sequence[Any], size: int) -> Iterator[tuple[Sequence[Any], int]]:
    """Yields batches of rows sorted by length, and the length of their outputs.

    It is 1.1 times that of the longest source of the (last) group of the batch.
    """
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        last = min(-(-(start + len(batch)) // GROUP) * GROUP, len(rows)) - 1
        yield batch, int(1.1 * len(rows[last]))


class CTranslate2:
    """Converted models. workers: batches that are translated at a time, by two threads in all."""

    def __init__(self, data: dict[str, Any], workers: int = 1) -> None:
        library, processor = import_module("ctranslate2"), import_module("sentencepiece")
        options = {"inter_threads": workers, "intra_threads": 2 // workers}
        self._random, self._trained = (
            library.Translator(data[name], compute_type="float32", **options).translate_batch
            for name in ("random", "trained")
        )
        self._tokenizer = processor.SentencePieceProcessor(model_file=data["tokenizer"])
        self._data = data

    def version(self) -> str:
        """Returns the version of the library."""
        return import_module("ctranslate2").__version__

    def loop(self, beam: int, batch: int) -> None:
        """Searches for outputs of given lengths."""
        pending: list[Any] = []
        for rows, length in batches(self._data["pieces"], batch):
            limits = {"max_decoding_length": length, "min_decoding_length": length}
            pending += self._random(rows, beam_size=beam, asynchronous=True, **limits)
        for result in pending:
            result.result()

    def text(self, beam: int, batch: int) -> list[str]:
        """Returns the translations of the lines of text."""
        rows = self._tokenizer.encode(self._data["lines"], out_type=str)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        pending: list[Any] = []
        for start in range(0, len(order), batch):
            members = [rows[i] for i in order[start : start + batch]]
            search = {"beam_size": beam, "length_penalty": 1.0, "asynchronous": True}
            most = 2 * (len(members[-1]) + 1) + 10
            pending += self._trained(members, max_decoding_length=most, **search)
        outputs = [""] * len(rows)
        for i, result in zip(order, pending, strict=True):
            outputs[i] = self._tokenizer.decode(result.result().hypotheses[0])
        return outputs


class HuggingFace:
    """`generate` of a MarianMTModel with random parameters."""

    def __init__(self, data: dict[str, Any], device: str = "cpu", dtype: str = "float32") -> None:
        self._torch, transformers = import_module("torch"), import_module("transformers")
        self._torch.manual_seed(0)
        self._rows, size = data["ids"], data["model"]
        names = {"layers": "layers", "attention_heads": "heads", "ffn_dim": "d_ff"}
        both = ("encoder", "decoder")
        sides = {f"{side}_{name}": size[ours] for side in both for name, ours in names.items()}
        config = transformers.MarianConfig(
            vocab_size=data["vocabulary"],
            d_model=size["d_model"],
            max_position_embeddings=size["max_length"],
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=3,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
            scale_embedding=True,
            **sides,
        )
        model = transformers.MarianMTModel(config).eval()
        self._model = model.to(device, getattr(self._torch, dtype))

    def version(self) -> str:
        """Returns the version of the library."""
        return import_module("transformers").__version__

    def loop(self, beam: int, batch: int) -> None:
        """Searches for outputs of given lengths."""
        for rows, length in batches(self._rows, batch):
            width = len(rows[-1])
            self.generate([row + [0] * (width - len(row)) for row in rows], beam, length)

    def generate(self, rows: Any, beam: int, length: int) -> None:
        """Searches for outputs of one length, of rows as long as each other."""
        ids = self._torch.tensor(rows).long().to(self._model.device)
        search = {"num_beams": beam, "min_new_tokens": length, "max_new_tokens": length}
        with self._torch.inference_mode():
            self._model.generate(ids, attention_mask=ids.ne(0).long(), do_sample=False, **search)
        if ids.is_cuda:
            self._torch.cuda.synchronize()


PEERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ctranslate2": CTranslate2,
    "ctranslate2_workers": partial(CTranslate2, workers=2),
    "hf_generate": HuggingFace,
}


def main(name: str, data: str) -> None:
    """Answers the calls for one peer."""
    peer = PEERS[name](json.loads(Path(data).read_text("utf-8")))
    for line in sys.stdin:
        method, arguments = json.loads(line)
        began = time.perf_counter()
        answer = getattr(peer, method)(**arguments)
        print(json.dumps([time.perf_counter() - began, answer]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
