"""Distributed training: ranks and their process group, the optimizer, and the optimizer step."""
