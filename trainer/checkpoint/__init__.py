"""Checkpoints: their format, tensors, writing without a stop, and resuming."""
