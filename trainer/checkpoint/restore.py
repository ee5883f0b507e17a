"""Restoring of a training's tensors from a checkpoint.

Any number of ranks and any parallel strategy may have written it.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainer.build import Training
from trainer.checkpoint.format import CheckpointManifest, Part, TensorEntry
from trainer.checkpoint.tensors import (
    DTYPE_NAMES,
    TensorShard,
    make_optimizer_state,
    tensor_shards,
)
from trainer.formats.errors import BadConfig
from trainer.runtime.ranks import Ranks


def restore(
    training: Training,
    directory: Path,
    manifest: CheckpointManifest,
    ranks: Ranks,
    *,
    progressed: Callable[[], None] = lambda: None,
) -> None:
    """Load a checkpoint's tensors into a training.

    Rank 0 reads tensors that all ranks hold, and broadcasts them. ``progressed`` is
    called before each tensor.

    Raises:
        BadConfig: If the checkpoint is of another model, or lacks a part.
    """
    make_optimizer_state(training)
    shards = tensor_shards(training, ranks)
    # All are checked before the first is filled, so that a rejected checkpoint leaves
    # the training as it is.
    for shard in shards:
        _check_entry(manifest.tensors.get(shard.name), shard, directory)
    with torch.no_grad(), contextlib.ExitStack() as open_files:
        reader = _TensorReader(directory, manifest, open_files)
        for shard in shards:
            progressed()
            if ranks.leads or not shard.shared:
                reader.fill(shard)
            if shard.shared:
                ranks.broadcast_tensor(shard.local)
    training.module.weights_changed()


def _check_entry(
    entry: TensorEntry | None, shard: TensorShard, directory: Path
) -> None:
    """Check that a stored tensor has the dtype and shape of this training's.

    Raises:
        BadConfig: If it differs, or is missing.
    """
    dtype = DTYPE_NAMES[shard.local.dtype]
    shape = list(shard.shape)
    if entry is not None and entry.dtype == dtype and entry.shape == shape:
        return
    stored = "missing" if entry is None else f"{entry.dtype} {entry.shape}"
    raise BadConfig(
        f"{directory} does not match the model: {shard.name} is {stored}, expected"
        f" {dtype} {shape} here",
        next_step="Resume with the profile that the run was started with.",
    )


class _TensorReader:
    """Reads tensors from the files of a checkpoint, each of which is opened once.

    Args:
        directory: Directory of the checkpoint.
        manifest: Manifest of the checkpoint.
        open_files: Stack that closes the files at its end.
    """

    def __init__(
        self,
        directory: Path,
        manifest: CheckpointManifest,
        open_files: contextlib.ExitStack,
    ) -> None:
        self._directory = directory
        self._manifest = manifest
        self._open_files = open_files
        self._files: dict[str, Any] = {}

    def fill(self, shard: TensorShard) -> None:
        """Fill a tensor from the stored parts that overlap it.

        Raises:
            BadConfig: If the parts do not cover all of it.
        """
        parts = self._manifest.tensors[shard.name].parts
        if shard.shape:
            is_complete = self._fill_array(shard, parts)
        else:
            is_complete = self._fill_scalar(shard, parts)
        if not is_complete:
            raise BadConfig(
                f"{self._directory} is incomplete: it lacks a part of {shard.name}",
                next_step="Resume from another one: --resume PATH",
            )

    def _fill_scalar(self, shard: TensorShard, parts: Sequence[Part]) -> bool:
        """Fill a tensor without dimensions; return whether it is stored."""
        if not parts:
            return False
        shard.local.copy_(self._open(parts[0].file).get_tensor(shard.name))
        return True

    def _fill_array(self, shard: TensorShard, parts: Sequence[Part]) -> bool:
        """Fill a tensor from parts in order; return whether they cover all of it.

        Positions are those in the first dimension of the whole tensor.
        """
        filled_to = shard.begin
        for part in parts:
            begin = max(part.begin, shard.begin)
            end = min(part.end, shard.end)
            if begin >= end:
                continue  # the part has nothing of this shard
            if begin != filled_to:
                # It leaves a gap, which no later part fills, as parts are in order; or
                # it repeats an earlier part.
                continue
            stored_tensor = self._open(part.file).get_slice(shard.name)
            stored = stored_tensor[begin - part.begin : end - part.begin]
            target = shard.local[begin - shard.begin : end - shard.begin]
            if stored.shape != target.shape:
                return False  # the file has less than the manifest promises
            target.copy_(stored)
            filled_to = end
        return filled_to >= shard.end

    def _open(self, name: str) -> Any:
        """Return a file of the checkpoint, opened by safetensors."""
        if name not in self._files:
            file = safe_open(self._directory / name, framework="pt")
            self._files[name] = self._open_files.enter_context(file)
        return self._files[name]
