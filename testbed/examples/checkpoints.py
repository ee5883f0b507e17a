"""What tests of checkpoints and of going on share: checkpoints and runs made by hand,
without training."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint import format
from trainer.config.resolve import ResolvedConfig
from trainer.config.train_config import TrainConfig
from trainer.data.sampler import Position
from trainer.record.run_record import RunExit, RunHeader
from trainer.record.writer import RunWriter

CONTENT = bytes(range(256)) * 4


def state_of(step: int = 5, **changes) -> format.TrainingState:
    values = {
        "step": step,
        "position": Position(steps=step, rows=8 * step, lanes=[step] * 8),
        "config": {},
        "config_sha256": "c",
        "dataset_hash": "d",
        "world_size": 1,
        "good": True,
        "health": {},
        "noise_scale": [0.0, 0.0],
        "head_overflows": 0,
        "skipped_steps": 0,
    }
    return format.TrainingState(**values | changes)


def entries(
    rank: int = 0, begin: int = 0, end: int = 4
) -> dict[str, format.TensorEntry]:
    """A tensor of four rows, of which a rank has some."""
    part = format.Part(file=f"rank-{rank:05d}.safetensors", begin=begin, end=end)
    return {"weights.a": format.TensorEntry(dtype="F32", shape=[4, 64], parts=[part])}


def write_checkpoint(
    root: Path,
    step: int = 5,
    *,
    rollbacks: int = 0,
    content: bytes = CONTENT,
    **changes,
) -> Path:
    """A whole one, as a single rank writes it."""
    name = format.checkpoint_name(step, rollbacks)
    writer = format.CheckpointWriter(
        root, name, attempt=1, rank=0, writers=[0], timeout_s=1.0
    )
    writer.write(memoryview(content), entries(), state_of(step, **changes))
    return root / name


def resolved_of(config: TrainConfig, data: Path = Path("d")) -> ResolvedConfig:
    return ResolvedConfig(
        config=config, sources={}, data_dir=data, profile_sha256="0" * 64
    )


def header_of(config: TrainConfig | None = None, **changes) -> RunHeader:
    values = {
        "schema_version": 5,
        "name": "m",
        "resumed_from": None,
        "resumed_step": 0,
        "job": "",
        "started_utc": "2026-01-01T00:00:00Z",
        "config": {},
        "sources": {},
        "profile_sha256": "b",
        "dataset_hash": "d",
        "world_size": 2,
        "gradient_accumulation_steps": 1,
        "global_batch_size": 8,
        "parameters": 10,
        "layout": "packed",
        "attention": "sdpa",
        "attention_reason": "asked for",
        "recipe_changes": [],
        "device": "cpu",
        "peak_flops_per_s": None,
        "versions": {},
    }
    if config is not None:
        values["config"] = config.model_dump(mode="json")
    return RunHeader(**values | changes)


def end_of(exit_code: int = 0, **changes) -> RunExit:
    values = {
        "exit_code": exit_code,
        "reason": "finished",
        "requeue": exit_code == 75,
        "steps": 2,
        "checkpoint": None,
        "seconds": 2.0,
        "finished_utc": "2026-01-01T00:00:02Z",
    }
    return RunExit(**values | changes)


def write_run(
    directory: Path, config: TrainConfig, steps=(5, 10), *, job="", end=None, good=True
) -> Path:
    """A run with checkpoints, whose process is gone."""
    writer = RunWriter(directory, active=True)
    writer.start(header_of(config, job=job))
    for step in steps:
        table = config.model_dump(mode="json")
        write_checkpoint(
            directory / format.CHECKPOINTS_DIRECTORY,
            step,
            config=table,
            good=good or step == min(steps),
        )
    if end is not None:
        writer.finish(end)
    leave(writer)
    return directory


def leave(writer: RunWriter) -> None:
    """Let go of the run, as a process that ends does."""
    lock, writer.lock = writer.lock, None
    if lock is not None:
        with contextlib.suppress(OSError):
            os.close(lock)


def refusing(name: str, number: int, method: str = "open") -> Callable[..., object]:
    """In place of a method of ``Path``: a file system that fails as soon as one of this
    name is read."""
    plain = getattr(Path, method)

    def read_or_fail(path: Path, *arguments, **options):
        if path.name == name:
            raise OSError(number, os.strerror(number))
        return plain(path, *arguments, **options)

    return read_or_fail
