"""Ranks, the optimizer step and the optimizer over them."""
