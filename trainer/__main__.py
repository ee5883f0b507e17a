"""``python -m trainer --profile P.toml [--data DIR] [--set train.key=value] [--out DIR]``; torchrun for many ranks."""

import argparse
import os
import sys
import time
from pathlib import Path

from trainer.config import ResolvedConfig, resolve
from trainer.errors import BadConfig, DoesNotFit, TrainerError
from trainer.progress import Update, progress
from trainer.record import (
    MODEL_DIRECTORY,
    EvaluationRow,
    RunExit,
    RunHeader,
    RunWriter,
    StepRow,
    default_run_directory,
    utc_now,
)
from trainer.stage import stage_data


def main() -> int:
    """Train one model from a profile; returns the exit code."""
    arguments = _parser().parse_args()
    leads = os.environ.get("RANK", "0") == "0"
    try:
        resolved = resolve(arguments.profile, assignments=arguments.set, data=arguments.data)
        if leads:
            _print_settings(resolved)
        writer = _writer(arguments.out or default_run_directory(resolved.config.model.name), active=leads)
    except TrainerError as error:
        _complain(error, leads=leads)
        return error.exit_code
    return _train(resolved, writer, leads=leads)


def _train(resolved: ResolvedConfig, writer: RunWriter, *, leads: bool) -> int:
    # Heavy: bad input has been answered by now, in a fraction of a second.
    import torch

    from trainer.loop import train
    from trainer.parallel import join_ranks, leave_ranks

    started_s = time.perf_counter()
    code, reason = 0, "finished"
    try:
        if resolved.config.data.stage_to is not None:
            with progress("stage") as copied:
                resolved = stage_data(resolved, update=copied)
        ranks = join_ranks(resolved.config)
        with progress("train") as update:
            train(resolved, ranks, writer, _Screen(update, resolved.config.max_steps))
    except KeyboardInterrupt:
        code, reason = 130, "interrupted"
    except TrainerError as error:
        _complain(error, leads=True)
        code, reason = error.exit_code, error.message
    except (torch.OutOfMemoryError, MemoryError) as error:
        code, reason = DoesNotFit.exit_code, f"out of memory: {error}"
        sys.stderr.write(
            f"error: {reason}\n  next: lower train.micro_batch_rows, or find the largest: autotune probe\n"
        )
    leave_ranks(together=code == 0)
    seconds = time.perf_counter() - started_s
    writer.finish(
        RunExit(exit_code=code, reason=reason, steps=writer.last_step, seconds=seconds, finished_utc=utc_now())
    )
    if leads and code == 0:
        print(f"run: {writer.directory}")
        print(f"model: {writer.directory / MODEL_DIRECTORY}")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Train a masked-LM encoder from a profile.")
    parser.add_argument("--profile", type=Path, required=True, help="a TOML profile, as autotune probe writes it")
    parser.add_argument(
        "--data", type=Path, help="dataset directory (else AUTOTUNE_DATA, else the profile's data.path)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="train.KEY=VALUE", help="override a setting")
    parser.add_argument("--out", type=Path, help="run directory (default: runs/<UTC>-<model>)")
    return parser


def _writer(directory: Path, *, active: bool) -> RunWriter:
    try:
        return RunWriter(directory, active=active)
    except OSError as error:
        raise BadConfig(f"cannot write {directory}: {error.strerror}", next_step="Choose another --out.") from error


def _print_settings(resolved: ResolvedConfig) -> None:
    """Every value and where it came from, on standard error."""
    values = resolved.config.model_dump(mode="json")
    for key, source in sorted(resolved.sources.items()):
        value: object = values
        for part in key.split(".")[1:]:
            value = value.get(part) if isinstance(value, dict) else None
        shown = str(resolved.data_dir) if key == "train.data.path" else str(value)
        sys.stderr.write(f"{key} = {shown}  ({source})\n")


class _Screen:
    """What rank 0 shows: how the run computes, then every logged step."""

    def __init__(self, update: Update, steps: int) -> None:
        self._update, self._steps = update, steps

    def begin(self, header: RunHeader) -> None:
        """Say what was decided, and what is different from the model's recipe."""
        rows = f"{header.layout} rows, {header.global_batch_rows} a step"
        lines = [f"{rows}; attention: {header.attention} ({header.attention_reason})"]
        if header.config["compile_layers"]:
            lines.append("layers are compiled in the first steps, which takes minutes")
        lines += [f"change of recipe: {change}" for change in header.recipe_changes]
        sys.stderr.write("".join(f"train: {line}\n" for line in lines))

    def step(self, row: StepRow) -> None:
        """Move the bar on."""
        mfu = "" if row.mfu is None else f", MFU {row.mfu:.1%}"
        note = f"step {row.step}/{self._steps} loss {row.loss:.3f} {row.real_tokens_per_s:,.0f} real tokens/s{mfu}"
        self._update(row.step, self._steps, note)

    def evaluation(self, row: EvaluationRow) -> None:
        """Show how the validation split fares."""
        sys.stderr.write(
            f"validation: step {row.step} loss {row.loss:.3f} perplexity {row.perplexity:,.1f} "
            f"masked accuracy {row.masked_accuracy:.1%}\n"
        )


def _complain(error: TrainerError, *, leads: bool) -> None:
    if leads:
        sys.stderr.write(f"error: {error.message}\n  next: {error.next_step}\n")


if __name__ == "__main__":
    sys.exit(main())
