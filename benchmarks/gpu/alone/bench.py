"""What the programs share that take a device for themselves: options, settings of the step, a file always whole."""

import gc
import json
import os
import sys
import tempfile
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.store import write_atomically

ROW_TOKENS = 512
SAMPLES_PER_ROW = 2
"""A packed row of 512 holds 2.1 samples in the mean, so others take so many for each of our rows."""
LOADER_WORKERS = 4
FOR_EVER = 100_000
_STEPS_PER_TURN, _TURNS = 10, 4
_TINY_TURNS = 1


class Findings:
    """What a program has found so far; the file holds all of it after every call.

    Args:
        file: The file.
        go_on: Whether what it holds already is kept.
    """

    def __init__(self, file: Path, *, go_on: bool) -> None:
        self._file = file
        self.found: dict[str, dict[str, Any]] = json.loads(file.read_text()) if go_on and file.is_file() else {}

    def has(self, part: str, name: str) -> bool:
        """Whether one finding of a part is there."""
        return name in self.found.get(part, {})

    def write(self, part: str, name: str, value: Any) -> None:  # noqa: ANN401 - any JSON value
        """Write one finding of a part."""
        self.found.setdefault(part, {})[name] = value
        write_atomically(self._file, json.dumps(self.found, indent=1) + "\n")


class Bench:
    """The dataset, and what all parts configure alike.

    Args:
        place: For files.
        data_dir: A prepared dataset.
        findings: Where results go.
        device: ``cpu`` or ``cuda``.
        tiny: Tiny sizes, to try the program itself.
    """

    def __init__(self, place: Path, data_dir: Path, findings: Findings, *, device: str, tiny: bool) -> None:
        self.tiny = tiny
        self.device = device
        self.place = place
        self.data_dir = data_dir
        self.findings = findings
        self.turns = _TINY_TURNS if tiny else _TURNS

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
                "precision": "fp32" if self.device == "cpu" else "bf16",
                # By its name, so that it is refused, rather than replaced in silence, where it cannot be had.
                "attention": "auto" if self.device == "cpu" else "varlen",
                "device": self.device,
                "log_interval_steps": 1 if self.tiny else _STEPS_PER_TURN,
                "checkpoint": {"enabled": False},  # the others save nothing either
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


def options_of(program: str, description: str, parts: Sequence[str], arguments: Sequence[str] | None) -> Namespace:
    """The options that all programs have; ``only`` is a list of parts.

    Of several GPUs one is left to be seen: transformers' Trainer would take every one it sees.
    """
    parser = ArgumentParser(prog=f"python -m {program}", description=description)
    add_file(parser)
    parser.add_argument("--data", type=Path, metavar="DIR", required=True, help="a prepared dataset")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default=",".join(parts), help=f"some of {', '.join(parts)}")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the program itself")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(parts):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return options


def add_file(parser: ArgumentParser) -> None:
    """The file of what was found, and whether to keep what it holds."""
    parser.add_argument("--json", type=Path, metavar="FILE", required=True)
    parser.add_argument("--go-on", action="store_true", help="keep what FILE holds, and measure what is missing")


def add_limit(parser: ArgumentParser) -> None:
    """The device memory that a program keeps to."""
    parser.add_argument("--budget-bytes", type=int, required=True, help="all of this process's device memory")
    parser.add_argument("--used-before-bytes", type=int, default=None, help="what the device held before, by NVML")


def run_parts(options: Namespace, parts: Mapping[str, Callable[[Bench], None]]) -> int:
    """Run the parts that were asked for, one's failure at no cost to the others; 1 if one failed, else 0."""
    findings, failed = Findings(options.json, go_on=options.go_on), False
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        bench = Bench(Path(place), options.data, findings, device=options.device, tiny=options.tiny)
        for name in options.only:
            sys.stderr.write(f"{name}\n")
            clean()
            try:
                parts[name](bench)
            except Exception as error:  # noqa: BLE001 - of whatever kind
                findings.write(name, "not measured", f"{type(error).__name__}: {error}")
                sys.stderr.write(traceback.format_exc())
                failed = True
    return int(failed)


def clean() -> None:
    """What one measurement left behind must not cost the next: graphs, memory, settings."""
    import torch

    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
