"""Decodes with CTranslate2 or Hugging Face for `tools.bench_decode`, in an environment of its own.

    python tools/decode_peers.py ctranslate2|hf

Reads tasks as lines of JSON and prints their results. Needs none of this project's packages.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

GROUP = 100
"""Number of sentences of similar length whose outputs have the same length."""


def serve(tasks: dict[str, Callable[..., Any]]) -> None:
    """Answers each line of standard input: a JSON object with the name of a task and arguments."""
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(tasks[request.pop("task")](**request)), flush=True)


def batches(rows: Sequence[Any], size: int) -> Iterator[tuple[Sequence[Any], int]]:
    """Yields batches of rows sorted by length, and the length of their outputs.

    It is 1.1 times that of the longest source of the (last) group of the batch.
    """
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        last = min(-(-(start + len(batch)) // GROUP) * GROUP, len(rows)) - 1
        yield batch, int(1.1 * len(rows[last]))


class CTranslate2:
    """workers: number of batches that are translated at a time, by two threads in all."""

    def __init__(self, model: str, workers: int = 1) -> None:
        ctranslate2 = import_module("ctranslate2")
        self.version = ctranslate2.__version__
        self._translator = ctranslate2.Translator(
            model,
            device="cpu",
            compute_type="float32",
            inter_threads=workers,
            intra_threads=2 // workers,
        )

    def loop(self, data: str, beam: int, batch: int) -> dict[str, Any]:
        """Returns the time of a search in which all lengths are given."""
        rows = json.loads(Path(data).read_text())["pieces"]
        began = time.perf_counter()
        found = [
            self._submit(members, beam, n, min_decoding_length=n)
            for members, n in batches(rows, batch)
        ]
        tokens = sum(len(each.result().hypotheses[0]) for results in found for each in results)
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    def text(self, tokenizer: str, source: str, beam: int, batch: int) -> dict[str, Any]:
        """Returns the time from lines of text to their translations, and these."""
        sentencepiece = import_module("sentencepiece")
        pieces = sentencepiece.SentencePieceProcessor(model_file=tokenizer)
        lines = Path(source).read_text("utf-8").splitlines()
        began = time.perf_counter()
        rows = pieces.encode(lines, out_type=str)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        found: list[Any] = []
        for start in range(0, len(order), batch):
            members = [rows[i] for i in order[start : start + batch]]
            most = 2 * (len(members[-1]) + 1) + 10
            found += self._submit(members, beam, most, length_penalty=1.0)
        outputs = [""] * len(rows)
        for i, result in zip(order, found, strict=True):
            outputs[i] = pieces.decode(result.result().hypotheses[0])
        return {"seconds": time.perf_counter() - began, "outputs": outputs}

    def _submit(self, rows: Any, beam: int, most: int, **options: Any) -> Any:
        return self._translator.translate_batch(
            rows, beam_size=beam, max_decoding_length=most, asynchronous=True, **options
        )


class HuggingFace:
    """`generate` of a MarianMTModel with random weights."""

    def __init__(self, vocabulary: int, d_model: int, layers: int, heads: int, d_ff: int) -> None:
        torch, transformers = import_module("torch"), import_module("transformers")
        torch.set_num_threads(2)
        torch.manual_seed(0)
        self.version = transformers.__version__
        sides = {}
        for side in ("encoder", "decoder"):
            names = (f"{side}_layers", f"{side}_attention_heads", f"{side}_ffn_dim")
            sides |= dict(zip(names, (layers, heads, d_ff), strict=True))
        config = transformers.MarianConfig(
            vocab_size=vocabulary,
            d_model=d_model,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=3,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
            scale_embedding=True,
            **sides,
        )
        self._model = transformers.MarianMTModel(config).eval()

    def loop(self, data: str, beam: int, batch: int) -> dict[str, Any]:
        """Returns the time of a search in which all lengths are given."""
        torch = import_module("torch")
        rows = json.loads(Path(data).read_text())["ids"]
        began, tokens = time.perf_counter(), 0
        with torch.inference_mode():
            for members, n in batches(rows, batch):
                width = len(members[-1])
                ids = torch.tensor([row + [0] * (width - len(row)) for row in members])
                options = {"num_beams": beam, "min_new_tokens": n, "max_new_tokens": n}
                found = self._model.generate(
                    input_ids=ids, attention_mask=(ids != 0).long(), do_sample=False, **options
                )
                tokens += len(found) * n
        return {"seconds": time.perf_counter() - began, "tokens": tokens}


def products(shapes: Sequence[Sequence[int]], tries: int) -> list[float]:
    """Returns the least time in seconds of products [B, M, K] x [B, K, N] with PyTorch."""
    torch = import_module("torch")
    torch.set_num_threads(2)
    found = []
    for b, m, k, n in shapes:
        left, right = torch.randn(b, m, k), torch.randn(b, k, n)
        times = []
        for _ in range(tries):
            began = time.perf_counter()
            torch.matmul(left, right)
            times.append(time.perf_counter() - began)
        found.append(min(times))
    return found


def main() -> None:
    """Serves the tasks of the peer that is named."""
    made: dict[str, Any] = {}

    def start(**options: Any) -> str:
        kind = {"ctranslate2": CTranslate2, "hf": HuggingFace}[sys.argv[1]]
        made["peer"] = kind(**options)
        return made["peer"].version

    serve(
        {
            "start": start,
            "loop": lambda **options: made["peer"].loop(**options),
            "text": lambda **options: made["peer"].text(**options),
            "products": products,
        }
    )


if __name__ == "__main__":
    main()
