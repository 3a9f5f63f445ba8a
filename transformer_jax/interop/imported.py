"""What the readers of models trained elsewhere share."""

import hashlib
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformer_jax.config import DecodeConfig, ModelConfig
from transformer_jax.errors import UserError, about
from transformer_jax.text.tokenizer import Tokenizers
from transformer_jax.types import Params

NEVER = -100.0
"""Bias of the logits of ids that the other vocabulary lacks: their probability is 0 in float32."""

PICKLE = (
    "is a pickle, which may execute code; convert it in Python, with transformers: "
    "MarianMTModel.from_pretrained(FOLDER).save_pretrained(OTHER)"
)
"""Why a file is refused, and the way round."""


class Imported(NamedTuple):
    """A model that was trained elsewhere."""

    model: ModelConfig
    decode: DecodeConfig  # the search that it comes with
    tokenizers: Tokenizers
    params: Params
    digests: dict[str, str]  # the SHA-256 of each file that was read, by its name


def with_defaults(
    options: Mapping[str, Any], supported: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Returns options, and the first of the supported values of each that is missing.

    UserError: the value of one has no counterpart here.
    """
    options = {name: values[0] for name, values in supported.items()} | {**options}
    for name, values in supported.items():
        if options[name] not in values:
            wanted = " or ".join(dict.fromkeys(map(repr, values)))
            value = reprlib.repr(options[name])  # aliases of YAML could make it endless
            raise UserError(f"{name}={value}: has no counterpart here; must be {wanted}")
    return options


def read_file(path: Path, digests: dict[str, str]) -> bytes:
    """Returns the bytes of a file, and adds their SHA-256 to `digests` by its name.

    UserError: it cannot be read.
    """
    with about(path):
        data = path.read_bytes()
    digests[path.name] = hashlib.sha256(data).hexdigest()
    return data
