"""Multi30k, English to German: two to three hours on a CPU.

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

STEPS = 12_800


def get_config() -> Config:
    model = replace(TINY, d_model=160, heads=5, kv_heads=1, d_ff=480, positions="rotary")
    return Config(
        model=replace(model, norm="pre", dropout=0.3, max_length=128),
        tokenizer=TokenizerConfig(vocabulary=4000),
        data=DataConfig(train=("train.en,train.de",), dev=("val.en,val.de",), batch_tokens=4096),
        optimizer=OptimizerConfig(
            kind="muon",
            schedule="linear",
            learning_rate=0.005,
            warmup=500,
            decay_steps=STEPS,
            ema=0.998,
        ),
        train=TrainConfig(steps=STEPS, evaluate_every=800, save_every=400, log_every=100),
        decode=DecodeConfig(beam=5, penalty="power", alpha=1.0),
    )
