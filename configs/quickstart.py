"""The first run: English to German on the built-in corpus, a few minutes on two CPU cores."""

from transformer_jax.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            layers=2, d_model=128, heads=4, d_ff=256, max_length=64, norm="pre", dropout=0.1
        ),
        tokenizer=TokenizerConfig(vocabulary=2000),
        data=DataConfig(train=("grammar",), dev=("grammar",), batch_tokens=2048, shapes=3),
        optimizer=OptimizerConfig(
            schedule="linear",
            learning_rate=0.003,
            warmup=200,
            decay_steps=1200,
            label_smoothing=0.0,
        ),
        train=TrainConfig(steps=1200, evaluate_every=300, save_every=300, log_every=20),
        decode=DecodeConfig(beam=1),
    )
