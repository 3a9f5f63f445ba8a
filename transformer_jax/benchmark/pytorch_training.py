"""PyTorch's `nn.Transformer` as a peer in training, for a process of its own. Imports no JAX."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_jax.benchmark.pytorch import Peer
from transformer_jax.special_ids import PAD

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Ids of the source, of the decoder's input and of its targets, [rows, length] each."""


class Training(Peer):
    """Makes the usual steps: embeddings, nn.Transformer, tied logits, label smoothing, fused Adam.

    The weights are float32; with another type, the step runs under autocast.
    """

    def load(
        self, sizes: dict[str, Any], batches: Sequence[Arrays], platform: str, compiled: bool
    ) -> dict[str, Any]:
        """Builds the model and loads the batches that `time` passes over.

        sizes: vocabulary, d_model, d_ff, heads, layers, decoder_layers, dropout, dtype. Returns
        PyTorch's version, the number of its threads, and that of the parameters.
        """
        torch: Any = importlib.import_module("torch")
        torch.manual_seed(0)
        device = "cuda" if platform == "gpu" else "cpu"
        model = _model(torch, sizes).to(device)
        run = torch.compile(model) if compiled else model
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
        loss_of = torch.nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
        dtype = getattr(torch, sizes["dtype"])
        autocast = {"dtype": dtype, "enabled": dtype != torch.float32}

        def move(array: np.ndarray) -> Any:
            return torch.from_numpy(array.astype(np.int64)).to(device)

        moved = [tuple(map(move, batch)) for batch in batches]

        def call() -> None:
            for source, target_in, target_out in moved:
                optimizer.zero_grad()
                with torch.autocast(device, **autocast):
                    loss = loss_of(run(source, target_in).flatten(0, 1), target_out.flatten())
                loss.backward()
                optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()

        self.call = call
        parameters = sum(each.numel() for each in model.parameters())
        facts = {"version": str(torch.__version__), "threads": torch.get_num_threads()}
        return facts | {"parameters": parameters}


def _model(torch: Any, sizes: dict[str, Any]) -> Any:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width, dropout = sizes["d_model"], sizes["dropout"]
            self.scale = width**0.5
            self.embed = torch.nn.Embedding(sizes["vocabulary"], width, padding_idx=PAD)
            counts = (sizes[name] for name in ("heads", "layers", "decoder_layers", "d_ff"))
            self.body = torch.nn.Transformer(width, *counts, dropout, batch_first=True)
            self.dropout = torch.nn.Dropout(dropout)

        def forward(self, source: Any, target: Any) -> Any:
            length, padding = target.shape[1], source == PAD
            causal = self.body.generate_square_subsequent_mask(length, device=source.device)
            ends = (self.dropout(self.embed(x) * self.scale) for x in (source, target))
            masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
            output = self.body(*ends, tgt_mask=causal, tgt_is_causal=True, **masks)
            return output @ self.embed.weight.T

    return Model()
