"""Checkpoints and runs written without training, for tests of what reads them."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint import format
from trainer.checkpoint.checkpoint_writer import CheckpointWriter
from trainer.config.resolve import ResolvedConfig
from trainer.data.position import Position
from trainer.formats.run_record import RunExit, RunHeader
from trainer.formats.train_config import TrainConfig
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


def tensor_entries(
    rank: int = 0, begin: int = 0, end: int = 4
) -> dict[str, format.TensorEntry]:
    """Describe a tensor of shape (4, 64), of which a rank writes one part."""
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
    """Write an intact checkpoint as a single rank does, and return its path."""
    name = format.checkpoint_name(step, rollbacks)
    writer = CheckpointWriter(
        root, name, attempt=1, rank=0, writing_ranks=[0], timeout_s=1.0
    )
    writer.write(memoryview(content), tensor_entries(), state_of(step, **changes))
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


def exit_of(exit_code: int = 0, **changes) -> RunExit:
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
    directory: Path,
    config: TrainConfig,
    steps=(5, 10),
    *,
    job: str = "",
    run_exit: RunExit | None = None,
    good: bool = True,
) -> Path:
    """Write a run with checkpoints, whose process has ended, and return its path.

    ``run_exit`` is how it ended; None if it was killed. If it is not ``good``, only its
    first checkpoint is.
    """
    writer = RunWriter(directory)
    writer.start(header_of(config, job=job))
    for step in steps:
        write_checkpoint(
            directory / format.CHECKPOINTS_DIRECTORY,
            step,
            config=config.model_dump(mode="json"),
            good=good or step == min(steps),
        )
    if run_exit is not None:
        writer.finish(run_exit)
    release_run(writer)
    return directory


def release_run(writer: RunWriter) -> None:
    """Release the lock of a run, as a process that ends does."""
    lock = writer.lock
    writer.lock = None
    if lock is not None:
        with contextlib.suppress(OSError):
            os.close(lock)


def failing_method(
    name: str, error_number: int, method: str = "open"
) -> Callable[..., object]:
    """Return a method of ``Path`` that fails on files with the given name.

    It replaces ``method``, as on a file system that is unreachable.
    """
    original = getattr(Path, method)

    def fail_or_call(path: Path, *arguments, **options):
        if path.name == name:
            raise OSError(error_number, os.strerror(error_number))
        return original(path, *arguments, **options)

    return fail_or_call
