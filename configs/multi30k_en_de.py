"""Multi30k, English to German: within an hour on two CPU cores.

Name the files on the command line, or use `make multi30k`, which also evaluates:

    transformer-jax train --config=configs/multi30k_en_de.py --run=runs/multi30k_en_de \\
        --config.data.train DIR/train.en.gz,DIR/train.de.gz \\
        --config.data.dev DIR/val.en.gz,DIR/val.de.gz
"""

from dataclasses import replace

from transformer_jax.config import (
    TINY,
    Config,
    DataConfig,
    DecodeConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)

STEPS = 10_000


def get_config() -> Config:
    return Config(
        model=replace(TINY, norm="pre", dropout=0.2, max_length=128),
        tokenizer=TokenizerConfig(vocabulary=4000),
        data=DataConfig(train=("train.en,train.de",), dev=("val.en,val.de",), batch_tokens=2048),
        optimizer=OptimizerConfig(
            schedule="linear", learning_rate=0.003, warmup=500, decay_steps=STEPS, ema=0.998
        ),
        train=TrainConfig(steps=STEPS, evaluate_every=500, save_every=250, log_every=50),
        decode=DecodeConfig(beam=5, penalty="power", alpha=1.0),
    )
