"""Whole training runs with all strategies beside them, as `aswa-hf train` and `aswa-hf reproduce` do them."""
