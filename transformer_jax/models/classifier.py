"""A model that labels sentences, with the Transformer's encoder or with its embeddings alone."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.attention.masks import Mask, padding_mask
from transformer_jax.attention.multi_head import Context, MultiHeadAttention
from transformer_jax.config import ModelConfig
from transformer_jax.dropout import dropout
from transformer_jax.models.embedding import Embedding
from transformer_jax.models.layers import Encoder, split_rng
from transformer_jax.models.transformer import Model, to_output
from transformer_jax.types import Auxiliary, Batch, Key, Memory, ModelOutput, Size


class Classifier(Model):
    """Maps source ids to logits of labels, which are the tokens of the target.

    Each label, and the end symbol after the last one, has a query of its own that attends to the
    encoder's output, or with `layers=0` to the embeddings. With kind soft, this is attention
    pooling. With kind latent, it is the model of Chen et al. 2016 (section 3), except that it
    projects the embeddings where the paper sums vectors of a second table. The labels are predicted
    independently of each other.
    """

    def setup(self) -> None:
        config = self.config
        self.source_embedding = Embedding(config, self.source_vocabulary, self.constrain)
        self.encoder = Encoder(config, self.kernel, self.constrain, self.remat)
        self.cross_attention = MultiHeadAttention(
            config, "cross_attention", self.kernel, self.constrain
        )
        shape = ((config.labels or 0) + 1, config.d_model)
        self.queries = self.param("queries", nn.initializers.normal(1.0), shape)
        self._set_up_output()

    def __call__(self, batch: Batch, rng: Key | None = None) -> ModelOutput:
        """Returns the logits of the first T labels. UserError: the model has fewer labels."""
        encoder_rng, labels_rng = split_rng(rng, 2)
        check_labels(self.config, batch.target_out.shape[1])
        memory, encoder = self.encode(batch.source, rng=encoder_rng)
        queries = self.queries[: batch.target_out.shape[1]]
        logits, labels = self._label(queries, memory, padding_mask(batch.source), labels_rng)
        return to_output(logits, batch, encoder, labels)

    def _label(
        self, queries: Float[Array, "T D"], memory: Memory, mask: Mask, rng: Key | None = None
    ) -> tuple[Float[Array, "B T V"], Auxiliary]:
        rngs = split_rng(rng, 2)
        x = jnp.broadcast_to(queries.astype(memory.dtype), (memory.shape[0], *queries.shape))
        keys_values = self.cross_attention.project(memory)
        y, auxiliary = self.cross_attention(x, Context(mask), rngs[0], keys_values)
        x = x + dropout(y, self.config.dropout, rngs[1])
        return self.logits(x), auxiliary.within("labels")

    def prefill(self, source: Int[Array, "B S"], beams: int, length: Size) -> Float[Array, "B T V"]:
        """Returns the logits of all labels, which is all the state of decoding."""
        memory, _ = self.encode(source)
        logits, _ = self._label(self.queries, memory, padding_mask(source))
        return logits

    def grow(self, state: Float[Array, "B T V"], length: int) -> Float[Array, "B T V"]:
        """Returns the state, which has the same size for any number of ids."""
        return state

    def decode_step(
        self, ids: Int[Array, "B K"], state: Float[Array, "B T V"], index: Int[Array, ""]
    ) -> tuple[Float[Array, "B K V"], Float[Array, "B T V"], Auxiliary]:
        """Returns the logits of the label at position `index`, which do not depend on `ids`."""
        logits = jnp.take(state, index, axis=1, mode="clip")[:, None]
        logits = jnp.broadcast_to(logits, (*ids.shape, logits.shape[-1]))
        return logits, state, Auxiliary()


def check_labels(config: ModelConfig, length: Size) -> None:
    """Checks that a classifier has enough labels for a target of `length` tokens.

    UserError: it has fewer.
    """
    enough = config.labels is None or length <= config.labels + 1
    reason = f"since there are targets of {length} tokens, end symbol included"
    config.require(enough, "labels", f"at least {length - 1}, {reason}")
