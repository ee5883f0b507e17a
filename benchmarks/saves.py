"""Parts of the benchmark of checkpoints.

They are a training that saves, and a checkpoint that is moved to another position in
its data.
"""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from testbed.corpora import real_lengths, write_learnable_corpus
from trainer.build import build_training
from trainer.checkpoint.format import (
    MANIFEST_FILE,
    CheckpointManifest,
    TrainingState,
    manifest_text,
    parse_manifest,
)
from trainer.checkpoint.manager import CheckpointManager, state_bytes
from trainer.config.resolve import resolve
from trainer.data.batch_plan import make_plan
from trainer.data.dataset import TokenDataset
from trainer.data.loader import make_loader, micro_batch_plans
from trainer.data.micro_batch_source import MicroBatchSource
from trainer.data.position import Position
from trainer.formats.events import EventRow
from trainer.formats.presets import model_settings
from trainer.formats.tables import read_json
from trainer.formats.train_config import CheckpointSettings, ModelSettings, TrainConfig
from trainer.runtime.ranks import join_ranks

_PROFILE = """\
schema_version = 3
[train]
seq_length_tokens = 512
layout = "packed"
micro_batch_size = 8
global_batch_size = 64
warmup_steps = 1
[train.model]
name = "tiny"
[train.model.config]
model_type = "bert"
num_hidden_layers = 1
hidden_size = 32
num_attention_heads = 2
intermediate_size = 32
"""


class SavingTrainer:
    """One rank of the trainer, whose steps and saves are called from outside.

    Args:
        place: Directory for data and checkpoints, not there yet.
        model: A preset.
        device: Device to train on.
        seq_length_tokens: Tokens of a sequence.
        rows: Sequences of a micro-batch, which is a whole step.
    """

    def __init__(
        self,
        place: Path,
        model: str,
        device: Literal["cpu", "cuda"],
        *,
        seq_length_tokens: int,
        rows: int,
    ) -> None:
        lengths = np.minimum(real_lengths(2000, seed=0), seq_length_tokens)
        data = write_learnable_corpus(
            place / "data", lengths, lengths[:10], vocab_size=22_016
        )
        settings: ModelSettings = model_settings(model)
        config = TrainConfig(
            model=settings,
            seq_length_tokens=seq_length_tokens,
            micro_batch_size=rows,
            global_batch_size=rows,
            layout="packed",
            attention_dropout=0.0,
            device=device,
            precision="bf16" if device == "cuda" else "fp32",
        )
        dataset = TokenDataset.open(data)
        ranks = join_ranks(config, environment={})
        plan = make_plan(config, len(dataset), 1)
        self._training = build_training(
            config, dataset.manifest.vocab_size, dataset.manifest.special_ids, ranks
        )
        source = MicroBatchSource(dataset, config, plan)
        self._loader = make_loader(
            source, config, micro_batch_plans(dataset, config, plan, 0)
        )
        kept = {
            way: CheckpointSettings(asynchronous=way, keep_last=1)
            for way in (False, True)
        }
        self._managers = {
            way: CheckpointManager(
                place / f"asynchronous-{way}",
                config.model_copy(update={"checkpoint": settings}),
                self._training,
                ranks,
                attempt=1,
                report_event=self._told,
            )
            for way, settings in kept.items()
        }
        self._file = place / "torch.pt"
        self._step_s = 0.0
        self._save_s = 0.0
        self._number = 0
        self.blocked_s: list[float] = []
        """Duration of each asynchronous call, in seconds."""
        self.state_bytes = state_bytes(self._training)
        self.device_name = ranks.device_name

    def steps(self, count: int) -> None:
        """Take optimizer steps."""
        began_s = time.perf_counter()
        for _ in range(count):
            result = self._training.step.run([next(self._loader)], 1e-4)
        float(result.loss)  # waits for the device
        self._step_s = (time.perf_counter() - began_s) / count

    def save(self, *, asynchronous: bool) -> None:
        """Save as the trainer does."""
        self._number += 1
        began_s = time.perf_counter()
        self._managers[asynchronous].save(_state(self._number), rollbacks=0)
        if asynchronous:
            self.blocked_s.append(time.perf_counter() - began_s)

    def torch_save(self) -> None:
        """Save the usual way: a pickle, synced."""
        state = {
            "model": self._training.module.state_dict(),
            "optimizer": self._training.optimizer.state_dict(),
        }
        with self._file.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def settle(self) -> None:
        """Wait for what is being written; what went wrong is an error here."""
        for manager in self._managers.values():
            manager.wait()

    def _told(self, event: EventRow) -> None:
        if event.level != "info":
            raise OSError(event.message)
        self._save_s = max(self._save_s, float(event.values["seconds"]))

    def steps_of_a_save(self) -> int:
        """Return how many steps the slowest save so far lasted."""
        return round(self._save_s / self._step_s)


def _state(step: int) -> TrainingState:
    return TrainingState(
        step=step,
        position=Position(steps=step, rows=0, lanes=(0,)),
        config={},
        config_sha256="",
        dataset_hash="",
        world_size=1,
        good=True,
        health={},
        noise_scale=[0.0, 0.0],
        head_overflows=0,
        skipped_steps=0,
    )


def write_profile(path: Path) -> Path:
    """Write a profile of a model that costs nothing beside its data."""
    path.write_text(_PROFILE)
    return path


def move_to_middle(checkpoint: Path, data: Path, out: Path) -> Path:
    """Copy a checkpoint, and move its position to the middle of the epoch.

    It is in the middle of a block as well.
    """
    shutil.copytree(checkpoint, out)
    table: dict[str, Any] = read_json(out / MANIFEST_FILE)
    manifest: CheckpointManifest = parse_manifest(table, str(out))
    config = resolve(out.parent.parent / "resume.toml", data=data).config
    plan = make_plan(config, len(TokenDataset.open(data)), 1)
    place = plan.blocks_per_epoch // 2 * plan.block_samples + plan.block_samples // 10
    position = Position(
        steps=manifest.state.position.steps,
        rows=manifest.state.position.rows,
        lanes=tuple(place + lane for lane in range(plan.lanes)),
    )
    moved = manifest.model_copy(
        update={"state": manifest.state.model_copy(update={"position": position})}
    )
    (out / MANIFEST_FILE).write_text(json.dumps(json.loads(manifest_text(moved))))
    return out
