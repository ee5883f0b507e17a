"""Checkpoints: file format, tensors, asynchronous writing, and resuming."""
