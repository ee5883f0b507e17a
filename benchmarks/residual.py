"""``python -m benchmarks.residual``: whether a residual stream in bf16 ends with the loss of one in fp32.

A BERT of 12 layers and hidden size 64 trains on functions of this machine's programs, 3,000 steps of 8 packed
sequences of 64 tokens, without dropout, by the trainer's own loop: with either stream and three seeds, and once in
fp32 throughout. Runs with the same seed have the same initial weights, samples and masks. The targets were set before
the first run: the means over the seeds differ by at most two standard errors of a difference (pooled over the seeds),
in validation loss and in train loss over the last 200 steps, and by at most 1 %.

Matmuls and attention of bf16 tensors are computed in fp32 and rounded to bf16, as Tensor Cores accumulate: few CPUs
have bf16 instructions, and emulation takes ten times as long. A finished run is kept in FILE and not repeated.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from autotune.base.tables import text_table
from benchmarks.bars import Bar, Direction, bars_of, finish, keep, measuring, parser, run
from tests.simulators.programs import run_program

STEPS, LAST_STEPS, SEEDS, HIDDEN, SEQ_LENGTH_TOKENS = 3000, 200, 3, 64, 64
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
_PREPARE = "-m autotune data prepare elf:/usr/bin --max-samples 5000 --vocab-size 8192 --long split --max-tokens 62"


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Train, print, and return the exit code; runs in the file of another dataset are repeated."""
    options_of = parser("residual", "Compare residual streams in bf16 and fp32.")
    options_of.add_argument("--data", type=Path, help="dataset; by default functions of this machine's programs")
    options = options_of.parse_args(arguments)
    from trainer.data.dataset import read_manifest

    with tempfile.TemporaryDirectory(prefix="residual-") as place:
        data: Path = options.data or Path(place) / "data"
        if options.data is None:
            share = ["--validation-share", "0.05", "--out", str(data)]
            run_program([sys.executable, *_PREPARE.split(), *share], timeout_s=1800)
        content: dict[str, Any] = {"dataset_hash": read_manifest(data).dataset_hash, "steps": STEPS, "runs": []}
        if options.json is not None and options.json.is_file():
            known = json.loads(options.json.read_text())
            if known["dataset_hash"] == content["dataset_hash"]:
                content["runs"] = known["runs"]
        runs: list[dict[str, Any]] = content["runs"]
        first, second, reference = STREAMS
        for name, seed in [*((name, seed) for seed in range(SEEDS) for name in (first, second)), (reference, 0)]:
            if not any((one["name"], one["seed"]) == (name, seed) for one in runs):
                runs.append({"name": name, "seed": seed} | losses(Path(place) / f"{name}-{seed}", data, name, seed))
                keep(options.json, [], content)
                sys.stderr.write(f"{runs[-1]}\n")
    rows = [[f"{name}, mean of seeds", *(f"{statistics.fmean(_of(runs, name, kind)):.4f}" for kind in _KINDS)]
            for name in STREAMS]  # fmt: skip
    rows += [[f"{one['name']}, seed {one['seed']}", *(f"{one[kind]:.4f}" for kind in _KINDS)] for one in runs]
    return finish(options.json, make_bars(runs), content, text_table(["", "validation loss", "train loss"], rows))


_KINDS = ("validation_loss", "train_loss")


def make_bars(runs: Iterable[dict[str, Any]]) -> list[Bar]:
    """Return the bars; a difference is one of means over the seeds, with either residual stream."""
    first, second, _ = STREAMS
    figures = []
    for kind in _KINDS:
        wide, narrow = (_of(runs, name, kind) for name in (first, second))
        difference = abs(statistics.fmean(narrow) - statistics.fmean(wide))
        error = ((statistics.variance(wide) + statistics.variance(narrow)) / len(wide)) ** 0.5
        figures.append((difference / error, difference / statistics.fmean(wide)))
    return bars_of(BARS, dict(zip(BARS, (figures[0][0], figures[1][0], figures[0][1]), strict=True)))


def _of(runs: Iterable[dict[str, Any]], name: str, kind: str) -> list[float]:
    return [one[kind] for one in runs if one["name"] == name]


def losses(place: Path, data: Path, name: str, seed: int, steps: int = STEPS) -> dict[str, float]:
    """Train on one thread; return the validation loss at the end and the mean train loss of the last steps, in nats."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    from trainer.config.resolve import ResolvedConfig
    from trainer.config.train_config import TrainConfig
    from trainer.distributed.ranks import join_ranks
    from trainer.loop import train
    from trainer.record.run_record import read_run
    from trainer.record.writer import RunWriter

    attention = "_scaled_dot_product_flash_attention_for_cpu"
    names = ("mm", "addmm", attention, f"{attention}_backward")
    computed_in_fp32 = {getattr(torch.ops.aten, one).default for one in names}

    class TensorCores(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
            if func not in computed_in_fp32 or args[0].dtype != torch.bfloat16:
                return func(*args, **kwargs or {})
            args, kwargs = tree_map_only(
                torch.Tensor, lambda one: one.float() if one.dtype == torch.bfloat16 else one, (args, kwargs or {})
            )
            # Attention's log-sum-exp, of three dimensions, stays in fp32.
            narrowed = lambda one: one if one.ndim == 3 else one.bfloat16()  # noqa: E731
            return tree_map_only(torch.Tensor, narrowed, func(*args, **kwargs))

    shape = {
        "model_type": "bert", "num_hidden_layers": 12, "hidden_size": HIDDEN, "num_attention_heads": 2,
        "intermediate_size": 4 * HIDDEN, "max_position_embeddings": SEQ_LENGTH_TOKENS, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    config = TrainConfig.model_validate({
        "model": {"name": "deep", "config": shape}, "seq_length_tokens": SEQ_LENGTH_TOKENS, "layout": "packed",
        "micro_batch_size": 8, "global_batch_size": 8, "max_steps": steps, "learning_rate": 1e-3, "seed": seed,
        "checkpoint": {"enabled": False}, **STREAMS[name],
    })  # fmt: skip
    ranks = join_ranks(config, environment={})
    torch.set_num_threads(1)
    resolved = ResolvedConfig(config=config, sources={}, data_dir=data, profile_sha256="0" * 64)
    with TensorCores():
        train(resolved, ranks, RunWriter(place, active=True), lambda row: None)
    found = read_run(place)
    last = [one.loss for one in found.steps[-LAST_STEPS:] if one.loss is not None]
    return {"validation_loss": found.evaluations[-1].loss, "train_loss": statistics.fmean(last)}


if __name__ == "__main__":
    run(main)
