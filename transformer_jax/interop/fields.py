"""Refuses the models that another toolkit cannot express."""

from collections.abc import Mapping
from typing import Any

from transformer_jax.config import ROLES, AttentionConfig, ModelConfig
from transformer_jax.errors import UserError


def require_fields(config: ModelConfig, toolkit: str, supported: Mapping[str, Any]) -> None:
    """Checks the values of fields, and that all attentions are soft ones of one kind in all layers.

    supported: by name the values that `toolkit` has. UserError: it has no such value.
    """
    soft = dict.fromkeys(ROLES, (AttentionConfig(),))
    for name, values in {**supported, **soft}.items():
        value = getattr(config, name)
        if value in values:
            continue
        if isinstance(value, AttentionConfig):
            name, value, values = f"{name}.kind", value.kind, ("soft",)
        wanted = " or ".join(map(str, values))
        raise UserError(f"model.{name}={value!r}: {toolkit} cannot express it; it must be {wanted}")
