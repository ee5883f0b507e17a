"""``python -m benchmarks.gpu.train --json FILE``: the training step on a Hopper GPU, against what others take.

Needs one GPU, no network and no dataset: lengths are those of real functions, ids mean nothing. The parts, some of
which can be chosen with ``--only``:

    same      varlen attention against rows under a mask, numerically; steps without a host wait; no recompilation
    mfu       bf16, rows of 512, bert-120m and bert-350m, each at its micro-batch: real tokens/s and MFU
    rivals    bert-120m against the paper-style step (fp32, with and without its loop over positions) and against
              transformers' Trainer (bf16, SDPA, padded to the longest sample); steps in turns, ratios of medians
    ablation  bert-120m with one thing left out at a time

Where ``accelerate`` is missing, transformers' Trainer cannot run; the same recipe as a plain loop is measured in any
case, under a name of its own. A figure that could not be had is printed as "not measured", its reason in the file.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.show.tables import text_table
from autotune.store import write_atomically
from benchmarks.bars import EXIT_UNMEASURED, Bar, exit_code, lines
from benchmarks.corpora import real_lengths, write_learnable_corpus

VOCAB_SIZE, ROW_TOKENS = 30_522, 512
TRAIN_SAMPLES, VALIDATION_SAMPLES = 200_000, 256
MODELS = {"bert-120m": 96, "bert-350m": 48}
"""Rows of a micro-batch; large enough that kernels are, small enough for any 80 GB card."""
RIVAL_ROWS = 64
MFU_BARS = {"bert-120m": 0.45, "bert-350m": 0.50}
PAPER_BAR, HF_BAR = 15.0, 2.5
SAMPLES_PER_ROW = 2
"""A packed row of 512 holds 2.1 samples in the mean, so others take so many for each of our rows."""
LOADER_WORKERS = 4
STEPS_PER_TURN, TURNS = 10, 4
FOR_EVER = 100_000

ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "everything": {},
    "without compiled layers": {"compile_layers": False},
    "without the narrow last layer": {"last_layer": "all"},
    "without the masked head": {"head": "dense", "last_layer": "all"},
    "without varlen (rows under a mask)": {"attention": "sdpa"},
    "without packing (padded rows)": {"layout": "padded"},
    "without packing (bucketed rows, not compiled)": {"layout": "bucketed", "compile_layers": False},
    "without bf16 (TF32)": {"precision": "fp32", "attention": "sdpa"},
    "with full checkpointing": {"checkpointing": "full"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for, print, write, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.train", description="The step on a GPU.")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU, to try the benchmark itself")
    options = parser.parse_args(arguments)
    # One GPU, for all: transformers' Trainer would take every one it sees.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    import torch

    if not options.tiny and not torch.cuda.is_available():
        sys.stderr.write("error: torch sees no GPU\n  next: run it where there is one, or try it with --tiny\n")
        return EXIT_UNMEASURED
    found: dict[str, Any] = {
        "device": "cpu" if options.tiny else torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        "tiny": options.tiny,
    }
    with tempfile.TemporaryDirectory(prefix="gpu-train-") as place:
        bench = Bench(Path(place), tiny=options.tiny)
        for name in wanted:
            sys.stderr.write(f"{name}\n")
            _clean()
            try:
                found[name] = PARTS[name](bench)
            except Exception as error:  # noqa: BLE001 - one part's failure, of whatever kind, must not cost the others
                found[name] = {"not measured": f"{type(error).__name__}: {error}"}
                sys.stderr.write(traceback.format_exc())
            _write(options.json, found)  # whole after every part
    bars = make_bars(found)
    found["bars"] = [bar.to_json() for bar in bars]
    _write(options.json, found)
    print(_table(found))
    print(lines(bars))
    return exit_code(bars)


def _clean() -> None:
    """What one measurement left behind must not cost the next: graphs, memory, settings."""
    import torch

    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _write(path: Path | None, found: Mapping[str, Any]) -> None:
    if path is not None:
        write_atomically(path, json.dumps(found, indent=1) + "\n")


class Bench:
    """The dataset, and what all parts configure alike."""

    def __init__(self, place: Path, *, tiny: bool) -> None:
        self.tiny = tiny
        self.place = place
        samples = 2000 if tiny else TRAIN_SAMPLES
        self.data_dir = write_learnable_corpus(
            place / "data",
            real_lengths(samples, seed=0),
            real_lengths(VALIDATION_SAMPLES, seed=1),
            vocab_size=1000 if tiny else VOCAB_SIZE,
        )

    def match(self, model: str, rows: int, **changes: Any) -> Any:  # noqa: ANN401 - any setting; a Match, which needs torch
        """What the contenders have in common: a model at a micro-batch, one of them per optimizer step."""
        from benchmarks.rivals import Match
        from trainer.config import DataSettings, TrainConfig
        from trainer.parallel import join_ranks
        from trainer.presets import model_settings

        settings = model_settings("bert-mini" if self.tiny else model)
        # The same on all sides: the fastest kernels know no dropout of attention weights.
        settings = settings.model_copy(
            update={"config": settings.config | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}}
        )
        rows = 2 if self.tiny else rows
        config = TrainConfig.model_validate(
            {
                "model": settings,
                "data": DataSettings(loader_workers=0 if self.tiny else LOADER_WORKERS),
                "layout": "packed",
                "seq_length_tokens": ROW_TOKENS,
                "micro_batch_rows": rows,
                "global_batch_rows": rows,
                "max_steps": FOR_EVER,
                "compile_layers": not self.tiny,
                "precision": "fp32" if self.tiny else "bf16",
                "device": "cpu" if self.tiny else "cuda",
                "log_interval_steps": 1 if self.tiny else STEPS_PER_TURN,
            }
            | changes
        )
        ranks = join_ranks(config, environment={})
        return Match(
            config=config,
            data_dir=self.data_dir,
            samples_per_step=SAMPLES_PER_ROW * rows,
            ranks=ranks,
            place=self.place,
        )


def same(bench: Bench) -> dict[str, Any]:
    """Whether varlen computes what masks compute, and whether steps ever wait for the device."""
    import torch

    from trainer.batch import make_plan
    from trainer.build import build_training
    from trainer.feed import MicroBatchSource, micro_batch_plans
    from trainer.recompute import GraphCounter

    found: dict[str, Any] = {}
    gradients: dict[str, list[torch.Tensor]] = {}
    ways = {"sdpa": {"attention": "sdpa"}, "varlen": {}, "varlen, whole last layer": {"last_layer": "all"}}
    for name, changes in ways.items():
        match = bench.match("bert-120m", 32, compile_layers=False, **changes)
        manifest = match.dataset.manifest
        training = build_training(match.config, manifest.vocab_size, manifest.special_ids, match.ranks)
        plan = make_plan(match.config, len(match.dataset), 1)
        source = MicroBatchSource(match.dataset, match.config, plan)
        batch = source.__getitems__(next(micro_batch_plans(match.dataset, match.config, plan, 0)))
        loss = training.module(batch.to(match.ranks.device)) / batch.predicted_tokens
        loss.backward()
        found[f"loss, {name}"] = float(loss.detach())
        found[f"attention, {name}"] = training.module.attention.kind
        gradients[name] = [
            parameter.grad.float() for parameter in training.model.parameters() if parameter.grad is not None
        ]
    for name in ("varlen", "varlen, whole last layer"):
        square = sum(
            float((one - other).square().sum()) for one, other in zip(gradients["sdpa"], gradients[name], strict=True)
        )
        norm = sum(float(one.square().sum()) for one in gradients["sdpa"])
        found[f"gradient distance, {name}"] = (square / norm) ** 0.5
    gradients.clear()
    _clean()
    match = bench.match("bert-120m", 32)
    training = build_training(match.config, manifest.vocab_size, manifest.special_ids, match.ranks)
    plan = make_plan(match.config, len(match.dataset), 1)
    source = MicroBatchSource(match.dataset, match.config, plan)
    plans = micro_batch_plans(match.dataset, match.config, plan, 0)
    batches = [source.__getitems__(next(plans)) for _ in range(12)]
    pinned = batches if bench.tiny else [batch.pin_memory() for batch in batches]
    counter = GraphCounter()
    for number, batch in enumerate(pinned):
        if number == 6 and not bench.tiny:
            torch.cuda.set_sync_debug_mode("error")
        training.step.run([batch], 1e-4, part_of_it=True)
        counter.stepped()
    found["steps without a host wait"] = len(pinned) - 6
    found["recompilations"] = counter.recompilations
    return found


def mfu(bench: Bench) -> dict[str, Any]:
    """Our loop alone, each model at its micro-batch."""
    return {model: _ours(bench.match(model, rows)) for model, rows in MODELS.items()}


def ablation(bench: Bench) -> dict[str, Any]:
    """One thing left out at a time; real tokens/s, and over those of everything."""
    found: dict[str, Any] = {}
    for name, changes in ABLATIONS.items():
        try:
            found[name] = _ours(bench.match("bert-120m", RIVAL_ROWS, **changes))
        except Exception as error:  # noqa: BLE001 - out of memory in one row of the table is a finding, too
            found[name] = {"not measured": f"{type(error).__name__}: {error}"}
    return found


def rivals(bench: Bench) -> dict[str, Any]:
    """All contenders in turns; rates per turn."""
    from benchmarks.rivals import Contender, HuggingFace, Ours, Paper, PlainHuggingFace

    match = bench.match("bert-120m", RIVAL_ROWS)
    contenders: dict[str, Contender] = {
        "ours": Ours(match),
        "paper-style": Paper(match),
        "paper-style, positions at once": Paper(match, position_loop=False),
        "HF recipe, plain loop": PlainHuggingFace(match),
    }
    try:
        import accelerate  # noqa: F401 - transformers' Trainer asks for it

        contenders["HF Trainer"] = HuggingFace(match)
    except ImportError:
        sys.stderr.write("accelerate is missing: transformers' Trainer is not measured\n")
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(TURNS + 2):
        for name, contender in contenders.items():
            done = contender.step()
            if turn > 1:  # the first ones compile and warm caches
                rates[name].append(done.real_tokens / done.seconds)
    for contender in contenders.values():
        contender.finish()
    return {"real_tokens_per_s": rates}


def _ours(match: Any) -> dict[str, Any]:  # noqa: ANN401 - a Match
    """Medians over the turns after warm-up."""
    from benchmarks.rivals import Ours

    _clean()
    ours = Ours(match)
    for _ in range(TURNS + 2):
        ours.step()
    ours.finish()
    rows = ours.rows[2:]
    return {
        "real_tokens_per_s": statistics.median(row.real_tokens_per_s for row in rows),
        "mfu": None if rows[0].mfu is None else statistics.median(row.mfu or 0.0 for row in rows),
        "mfu_6n": None if rows[0].mfu_6n is None else statistics.median(row.mfu_6n or 0.0 for row in rows),
        "step_s": statistics.median(row.step_s for row in rows),
        "data_wait_s": statistics.median(row.data_wait_s for row in rows),
        "compute_s": statistics.median(row.compute_s for row in rows),
        "optimizer_s": statistics.median(row.optimizer_s for row in rows),
        "packing_efficiency": statistics.median(row.packing_efficiency for row in rows),
        "peak_memory_bytes": rows[-1].peak_memory_bytes,
        "head_overflows": rows[-1].head_overflows,
        "recompilations": rows[-1].recompilations,
        "rows_per_microbatch": match.config.micro_batch_rows,
    }


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "same": same,
    "mfu": mfu,
    "rivals": rivals,
    "ablation": ablation,
}


def make_bars(found: Mapping[str, Any]) -> list[Bar]:
    """MFU of both models, and the ratios to the rivals; a part that is missing leaves its bars unmeasured."""
    bars = [
        Bar(
            name=f"gpu_train_{model.replace('-', '_')}_mfu_share",
            figure=found.get("mfu", {}).get(model, {}).get("mfu"),
            unit="share",
            bar=bar,
            direction=">=",
        )
        for model, bar in MFU_BARS.items()
    ]
    rates = {
        name: statistics.median(values) for name, values in found.get("rivals", {}).get("real_tokens_per_s", {}).items()
    }

    def ratio(name: str) -> float | None:
        return rates["ours"] / rates[name] if rates.get(name) else None

    for name, reference, bar in (
        ("paper", "paper-style", PAPER_BAR),
        ("paper_positions_at_once", "paper-style, positions at once", PAPER_BAR),
        ("hf_trainer", "HF Trainer", HF_BAR),
    ):
        bars.append(
            Bar(name=f"gpu_train_against_{name}_ratio", figure=ratio(reference), unit="ratio", bar=bar, direction=">=")
        )
    return bars


def _table(found: Mapping[str, Any]) -> str:
    sections = [found["device"]]
    for part in ("mfu", "ablation"):
        rows = [
            [
                name,
                f"{one['real_tokens_per_s']:,.0f}" if "real_tokens_per_s" in one else "not measured",
                f"{one['mfu']:.1%}" if one.get("mfu") else "n/a",
            ]
            for name, one in found.get(part, {}).items()
            if isinstance(one, dict)
        ]
        if rows:
            sections.append(f"{part}\n" + text_table(["", "real tokens/s", "MFU"], rows))
    rates = found.get("rivals", {}).get("real_tokens_per_s", {})
    if rates:
        ours = statistics.median(rates["ours"])
        rows = [
            [name, f"{statistics.median(one):,.0f}", f"{ours / statistics.median(one):.2f}"]
            for name, one in rates.items()
        ]
        sections.append("rivals\n" + text_table(["", "real tokens/s", "ours is faster by"], rows))
    for name, value in found.get("same", {}).items():
        sections.append(f"{name}: {value}")
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    sys.exit(main())
