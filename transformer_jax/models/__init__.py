"""Models as pure Linen modules: the encoder-decoder Transformer and the classifier."""
