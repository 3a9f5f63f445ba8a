"""Decodes with CTranslate2 or Hugging Face for `tools.bench_decode`, in an environment of its own.

    python tools/decode_peers.py ctranslate2|hf DATA.json [OPTION=VALUE ...]

reads calls of the peer's methods from standard input and writes what they return, and the seconds
that they take, to standard output; both are lines of JSON. Needs none of this project's packages.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
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
    """A converted model. workers: batches that are translated at a time, by two threads in all."""

    def __init__(self, data: dict[str, Any], model: str, workers: str) -> None:
        self._translator = import_module("ctranslate2").Translator(
            model,
            device="cpu",
            compute_type="float32",
            inter_threads=int(workers),
            intra_threads=2 // int(workers),
        )
        processor = import_module("sentencepiece").SentencePieceProcessor
        self._tokenizer = processor(model_file=data["tokenizer"])
        self._data = data

    def version(self) -> str:
        """Returns the version of the library."""
        return import_module("ctranslate2").__version__

    def loop(self, beam: int, batch: int) -> None:
        """Searches for outputs of given lengths."""
        pending: list[Any] = []
        for rows, length in batches(self._data["pieces"], batch):
            pending += self._submit(rows, beam, length, min_decoding_length=length)
        for result in pending:
            result.result()

    def text(self, beam: int, batch: int) -> list[str]:
        """Returns the translations of the lines of text."""
        rows = self._tokenizer.encode(self._data["lines"], out_type=str)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        pending: list[Any] = []
        for start in range(0, len(order), batch):
            members = [rows[i] for i in order[start : start + batch]]
            most = 2 * (len(members[-1]) + 1) + 10
            pending += self._submit(members, beam, most, length_penalty=1.0)
        outputs = [""] * len(rows)
        for i, result in zip(order, pending, strict=True):
            outputs[i] = self._tokenizer.decode(result.result().hypotheses[0])
        return outputs

    def _submit(self, rows: Any, beam: int, most: int, **options: Any) -> list[Any]:
        return self._translator.translate_batch(
            rows, beam_size=beam, max_decoding_length=most, asynchronous=True, **options
        )


class HuggingFace:
    """`generate` of a MarianMTModel with random parameters."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._torch, transformers = import_module("torch"), import_module("transformers")
        self._torch.set_num_threads(2)
        self._torch.manual_seed(0)
        self._rows, size = data["ids"], data["model"]
        sides = {}
        for side in ("encoder", "decoder"):
            sides[f"{side}_layers"] = size["layers"]
            sides[f"{side}_attention_heads"] = size["heads"]
            sides[f"{side}_ffn_dim"] = size["d_ff"]
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
        self._model = transformers.MarianMTModel(config).eval()

    def version(self) -> str:
        """Returns the version of the library."""
        return import_module("transformers").__version__

    def loop(self, beam: int, batch: int) -> None:
        """Searches for outputs of given lengths."""
        with self._torch.inference_mode():
            for rows, length in batches(self._rows, batch):
                width = len(rows[-1])
                ids = self._torch.tensor([row + [0] * (width - len(row)) for row in rows])
                self._model.generate(
                    input_ids=ids,
                    attention_mask=ids.ne(0).long(),
                    do_sample=False,
                    num_beams=beam,
                    min_new_tokens=length,
                    max_new_tokens=length,
                )

    def matmuls(self, shapes: Sequence[Sequence[int]], tries: int) -> list[float]:
        """Returns the least seconds of each product [B, M, K] x [B, K, N]."""
        least = []
        for b, m, k, n in shapes:
            left, right = self._torch.randn(b, m, k), self._torch.randn(b, k, n)
            times = []
            for _ in range(tries):
                began = time.perf_counter()
                self._torch.matmul(left, right)
                times.append(time.perf_counter() - began)
            least.append(min(times))
        return least


PEERS = {"ctranslate2": CTranslate2, "hf": HuggingFace}


def main(name: str, data: str, *options: str) -> None:
    """Answers the calls for one peer."""
    given = dict(option.split("=", 1) for option in options)
    peer = PEERS[name](json.loads(Path(data).read_text("utf-8")), **given)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        began = time.perf_counter()
        answer = getattr(peer, method)(**arguments)
        print(json.dumps([time.perf_counter() - began, answer]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
