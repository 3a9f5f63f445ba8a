"""The command `attention`."""

from __future__ import annotations

from transformer_jax.attention_view import attention_view
from transformer_jax.cli.arguments import ConfigArguments
from transformer_jax.cli.commands import Attention
from transformer_jax.cli.common import load_translator
from transformer_jax.decoding.attention_weights import attention_weights
from transformer_jax.files import local_path, write_whole


def run(options: Attention, arguments: ConfigArguments) -> None:
    """Writes the page."""
    translator = load_translator(options, arguments)
    target = options.target
    if target is None:
        target = translator(options.sentence).text
    page = attention_view(attention_weights(translator, options.sentence, target))
    with write_whole(local_path(options.output, "--output")) as file:
        file.write(page)
