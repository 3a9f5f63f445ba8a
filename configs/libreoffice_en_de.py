"""LibreOffice's help, English to German: longer, technical sentences with placeholders.

The recipe of Multi30k, with fewer steps, longer sentences and more subwords, and with the
placeholder of the help, <?>, as a token of its own. `make study NAME=libreoffice_en_de` names the
files, too:

    transformer-jax train --config=configs/libreoffice_en_de.py --run=runs/libreoffice_en_de \\
        --config.data.train DIR/train.en-de.tsv.gz --config.data.dev DIR/dev.en-de.tsv.gz
"""

from dataclasses import replace
from pathlib import Path

from transformer_jax.config import Config, load_config_file

STEPS = 4_000


def get_config() -> Config:
    base = load_config_file(Path(__file__).with_name("multi30k_en_de.py"))
    return replace(
        base,
        model=replace(base.model, max_length=256),
        tokenizer=replace(base.tokenizer, vocabulary=8000, symbols=("<?>",)),
        data=replace(base.data, train=("train.tsv",), dev=("dev.tsv",)),
        optimizer=replace(base.optimizer, decay_steps=STEPS),
        train=replace(base.train, steps=STEPS),
    )
