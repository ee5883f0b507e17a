"""A ``LightningModule`` and its data as a subject."""

from autotune.subjects.lightning.jobs import module_loader, module_step

__all__ = ["module_loader", "module_step"]
