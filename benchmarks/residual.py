"""``python -m benchmarks.residual``: the loss with a residual stream in bf16.

It is compared with that of a stream in fp32. A BERT of 12 layers and hidden size 64
trains on functions of this machine's programs, 3,000 steps of 8 packed sequences of 64
tokens, without dropout, by the trainer's own loop: with either stream and three seeds,
and once in fp32 throughout. Runs with the same seed have the same initial weights,
samples and masks. The targets were set before the first run: the means over the seeds
differ by at most two standard errors of a difference (pooled over the seeds), and by at
most 1 %. This applies to validation loss, and to train loss over the last 200 steps.

Matmuls and attention of bf16 tensors are computed in fp32 and their results rounded to
bf16, as Tensor Cores do: without bf16 instructions, torch's own kernels take several
times as long. Finished runs in FILE are not repeated.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from autotune.base.tables import text_table
from benchmarks.bars import (
    Bar,
    Direction,
    bars_of,
    finish,
    keep,
    measuring,
    parser,
    run,
)
from testbed.programs import run_program
from trainer.config.resolve import ResolvedConfig
from trainer.formats.manifest import read_manifest
from trainer.formats.run_record import read_run
from trainer.formats.train_config import TrainConfig
from trainer.loop import train
from trainer.record.writer import RunWriter
from trainer.runtime.ranks import join_ranks

STEPS, LAST_STEPS, SEEDS, HIDDEN, SEQ_LENGTH_TOKENS = 3000, 200, 3, 64, 64
KINDS = ("validation_loss", "train_loss")
STREAMS: dict[str, dict[str, str]] = {
    "bf16, fp32 residual stream": {"precision": "bf16", "residual_dtype": "fp32"},
    "bf16, bf16 residual stream": {"precision": "bf16", "residual_dtype": "bf16"},
    "fp32": {"precision": "fp32"},
}
BARS: dict[str, tuple[str, Direction, float]] = {
    "residual_validation_loss_difference_errors": ("standard errors", "<=", 2.0),
    "residual_train_loss_difference_errors": ("standard errors", "<=", 2.0),
    "residual_validation_loss_difference_share": ("share", "<=", 0.01),
}
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_ROUNDED = [
    getattr(torch.ops.aten, operator).default
    for operator in ("mm", "addmm", _ATTENTION, f"{_ATTENTION}_backward")
]
_SAMPLES = (
    "elf:/usr/bin",
    "--max-samples",
    "5000",
    "--vocab-size",
    "8192",
    "--max-tokens",
    str(SEQ_LENGTH_TOKENS - 2),
    "--long",
    "split",
    "--validation-share",
    "0.05",
)


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Train, print, and return the exit code.

    Runs of another dataset in the file are not used.
    """
    options = parser(
        "residual", "Compare residual streams in bf16 and fp32."
    ).parse_args(arguments)
    first, second, reference = STREAMS
    with tempfile.TemporaryDirectory(prefix="residual-") as place:
        data = Path(place) / "data"
        run_program(
            [
                sys.executable,
                "-m",
                "autotune",
                "data",
                "prepare",
                *_SAMPLES,
                "--out",
                str(data),
            ]
        )
        content: dict[str, Any] = {
            "dataset_hash": read_manifest(data).dataset_hash,
            "steps": STEPS,
            "runs": [],
        }
        if options.json is not None and options.json.is_file():
            known = json.loads(options.json.read_text())
            if known["dataset_hash"] == content["dataset_hash"]:
                content["runs"] = known["runs"]
        runs: list[dict[str, Any]] = content["runs"]
        for name, seed in [
            *((name, seed) for seed in range(SEEDS) for name in (first, second)),
            (reference, 0),
        ]:
            if not any((run["name"], run["seed"]) == (name, seed) for run in runs):
                runs.append(
                    {"name": name, "seed": seed}
                    | losses(Path(place) / f"{name}-{seed}", data, name, seed)
                )
                keep(options.json, [], content)
                sys.stderr.write(f"{runs[-1]}\n")
    rows = [
        [run["name"], str(run["seed"]), *(f"{run[kind]:.4f}" for kind in KINDS)]
        for run in runs
    ]
    return finish(
        options.json,
        make_bars(runs),
        content,
        text_table(["", "seed", "validation loss", "train loss"], rows),
    )


def make_bars(runs: Iterable[dict[str, Any]]) -> list[Bar]:
    """Return the bars; a difference is between means over the seeds."""
    pairs = [
        [
            [run[kind] for run in runs if run["name"] == name]
            for name in tuple(STREAMS)[:2]
        ]
        for kind in KINDS
    ]
    differences = [
        abs(statistics.fmean(narrow) - statistics.fmean(wide)) for wide, narrow in pairs
    ]
    errors = [
        ((statistics.variance(wide) + statistics.variance(narrow)) / SEEDS) ** 0.5
        for wide, narrow in pairs
    ]
    figures = [
        difference / error
        for difference, error in zip(differences, errors, strict=True)
    ]
    return bars_of(
        BARS,
        dict(
            zip(
                BARS,
                [*figures, differences[0] / statistics.fmean(pairs[0][0])],
                strict=True,
            )
        ),
    )


def losses(
    place: Path, data: Path, name: str, seed: int, steps: int = STEPS
) -> dict[str, float]:
    """Train on one thread.

    Returns:
        The validation loss at the end and the mean train loss of the last steps, in
        nats.
    """
    shape = {
        "model_type": "bert",
        "num_hidden_layers": 12,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "intermediate_size": 4 * HIDDEN,
        "max_position_embeddings": SEQ_LENGTH_TOKENS,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    config = TrainConfig.model_validate(
        {
            "model": {"name": "deep", "config": shape},
            "seq_length_tokens": SEQ_LENGTH_TOKENS,
            "layout": "packed",
            "micro_batch_size": 8,
            "global_batch_size": 8,
            "max_steps": steps,
            "learning_rate": 1e-3,
            "seed": seed,
            "checkpoint": {"enabled": False},
            **STREAMS[name],
        }
    )
    ranks = join_ranks(config, environment={})
    torch.set_num_threads(1)
    resolved = ResolvedConfig(
        config=config, sources={}, data_dir=data, profile_sha256="0" * 64
    )
    with _TensorCores():  # type: ignore[no-untyped-call]  # torch declares no types
        train(resolved, ranks, RunWriter(place), lambda row: None)
    record = read_run(place)
    last = [step.loss for step in record.steps[-LAST_STEPS:] if step.loss is not None]
    validation_loss = record.evaluations[-1].loss
    assert validation_loss is not None
    return {
        "validation_loss": validation_loss,
        "train_loss": statistics.fmean(last),
    }


class _TensorCores(TorchDispatchMode):
    """Compute matmuls and attention of bf16 tensors in fp32.

    Their results are rounded to bf16.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _ROUNDED or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs or {})
        args, kwargs = tree_map_only(torch.Tensor, _widened, (args, kwargs or {}))
        # Attention's log-sum-exp, of three dimensions, stays in fp32.
        return tree_map_only(
            torch.Tensor,
            lambda tensor: tensor if tensor.ndim == 3 else tensor.bfloat16(),
            func(*args, **kwargs),
        )


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


if __name__ == "__main__":
    run(main)
