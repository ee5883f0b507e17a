"""Hugging Face ``Trainer`` as a subject."""

from autotune.subjects.transformers.jobs import trainer_loader, trainer_step

__all__ = ["trainer_loader", "trainer_step"]
