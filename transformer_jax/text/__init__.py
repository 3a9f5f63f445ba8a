"""Text files, built-in corpora and tokenizers."""
