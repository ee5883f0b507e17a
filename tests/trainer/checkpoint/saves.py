"""Saves of a checkpoint manager, and the steps and files of checkpoints."""

from pathlib import Path

from testbed.examples.checkpoints import state_of
from trainer.checkpoint.format import step_of
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.stored_checkpoints import list_checkpoints

SHARE = "rank-00000.safetensors"
"""File of tensors of a checkpoint of one rank."""


def save(manager: CheckpointManager, step: int, **changes) -> None:
    """Save a state, and wait until the save has succeeded or failed."""
    manager.save(state_of(step, **changes), rollbacks=0, wait=True)


def hidden_files(root: Path) -> list[Path]:
    """Return partial and leftover files beside the checkpoints."""
    return list(root.glob(".*"))


def steps_in(root: Path) -> list[int]:
    """Return the steps of all checkpoints, newest first."""
    return [step_of(path.name) for path in list_checkpoints(root)]
