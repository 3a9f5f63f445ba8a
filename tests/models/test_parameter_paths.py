"""What the paths of parameters say is true of the parameters of a model."""

import re
from dataclasses import replace

import pytest
from common import build, flat, tiny

from transformer_jax.errors import UserError
from transformer_jax.models.parameter_paths import PARTS, dimension_names, select

SIZES = {"d_model": 16, "heads": 4, "head_size": 4, "state": 16, "d_ff": 32, "vocabulary": 12}


@pytest.mark.parametrize("layer", ["attention", "ssru"])
def test_names_of_dimensions_fit_the_shapes(layer: str) -> None:
    """Also of a state that holds parameters, whose paths are longer."""
    config = tiny(heads=4, d_ff=32, tied="none", activation="swiglu", output_bias=True)
    _, params = build(replace(config, self_layer=layer), 12, 12)
    unnamed = {"scale", "bias"}
    for path, leaf in flat(params).items():
        names = dimension_names(path)
        assert tuple(SIZES[name] for name in names) == (leaf.shape if names else ()), path
        assert names or path.rpartition("/")[2] in unnamed, path
        assert dimension_names(f"opt_state/0/mu/{path}") == names


def test_parts_are_selected() -> None:
    """Each is there, and not all; a pattern of nothing is refused, and those of everything."""
    paths = [*flat(build(tiny())[1])]
    for part in PARTS:
        chosen = select([part], paths, "frozen")
        assert 0 < len(chosen) < len(paths)
        assert all(part.removesuffix("s") in path for path in chosen)
    hints = {"encodr": "encoder", "norm": "norms", "encoder/layer_0/*": "encoder/layers_0/*"}
    for pattern, hint in hints.items():
        message = f"frozen='{pattern}': matches no parameter; did you mean {hint}?"
        with pytest.raises(UserError, match=re.escape(message)):
            select(["decoder", pattern], paths, "frozen")
    with pytest.raises(UserError, match=r"='encoder decoder emb.*': must not match every"):
        select(["encoder", "decoder", "embeddings"], paths, "frozen")
