"""The command `transformer-jax`: parses options, calls functions of the library, prints."""
