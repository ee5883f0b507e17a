"""Measured values of a check, beside predicted ones.

Each figure is a list of rows, whose first value names the row; units are in the names
of the values.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.evidence.baseline import TUNED
from autotune.evidence.profile import Profile
from autotune.profiles.store import read_profile
from benchmarks.gpu.results import ENDED
from benchmarks.gpu.stage import PROFILES, RUNS, fill
from benchmarks.gpu.stages import RESIDUAL_SEEDS, RESIDUAL_STREAMS, SHAPES, TRAINERS
from trainer.formats.run_record import Run, read_run

Row = dict[str, Any]


def figures_of(folder: Path, check: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Return the figures of a check: rows by the name of their table.

    They are from profiles, runs and answers of stages that ended.
    """
    source = _Source(folder, check)
    tables: dict[str, Callable[[_Source], Iterator[Row]]] = {
        "promised": _promised,
        "step": _step_settings,
        "shapes": _shapes,
        "training": _trainings,
        "trainers": _trainers,
        "capped": _capped,
        "residual": _residual_streams,
        "memory": _memory,
        "own_code": _own_code,
        "workers": _workers,
        "imitations": _imitations,
        "network": _network,
        "single": _single,
    }
    return {name: list(rows_of(source)) for name, rows_of in tables.items()}


class _Source:
    """Profiles, runs and answers of a check's stages that ended."""

    def __init__(self, folder: Path, check: Mapping[str, Any]) -> None:
        self.gpu = str(check["name"])
        self.references: list[Row] = check.get("references", [])
        self.stages = {
            name: stage
            for name, stage in check["stages"].items()
            if stage["status"] == ENDED
        }
        self.profiles = {
            path.stem: read_profile(path).profile
            for path in sorted(folder.glob(f"{PROFILES}/*.toml"))
        }
        self.runs = {
            path.name: read_run(path)
            for path in sorted(folder.glob(f"{RUNS}/*"))
            if path.name in self.stages or f"train-{path.name}" in self.stages
        }

    def answer(self, name: str) -> Any:
        """Return the answer of a stage; empty if it did not end."""
        return self.stages.get(name, {}).get("answer") or {}

    def is_probed(self, name: str) -> bool:
        """Return whether a stage of this check wrote a profile.

        Others were brought along from a kept check, which shows their memory.
        """
        path = f"{PROFILES}/{name}.toml"
        return any(
            path in [fill(word, gpu=self.gpu) for word in stage["words"]]
            or f"{stage_name}-{self.gpu}" == f"tune-{name}"
            for stage_name, stage in self.stages.items()
        )

    def tuned_models(self) -> Iterator[tuple[str, Profile]]:
        """Yield the models with a profile for this GPU."""
        for name, profile in self.profiles.items():
            if name.endswith(f"-{self.gpu}"):
                yield name.removesuffix(f"-{self.gpu}"), profile


def _promised(source: _Source) -> Iterator[Row]:
    """Yield promised tokens/s, and those that trainings delivered."""
    for model, profile in source.tuned_models():
        confirm = profile.evidence.confirm
        if confirm is None or f"tune-{model}" not in source.stages:
            continue
        delivered = confirm.delivered
        run = source.runs.get(model)
        trained = _median(run, "tokens_per_s_per_rank") if run else None
        promised = confirm.promised_tokens_per_s
        yield {
            "model": model,
            "promised_tokens_per_s": promised,
            "promised_low_per_s": confirm.promised_low,
            "promised_high_per_s": confirm.promised_high,
            "delivered_by_tune_per_s": delivered.tokens_per_s if delivered else None,
            "delivered_by_train_per_s": trained,
            "tune_to_promised_ratio": (
                delivered.tokens_per_s / promised if delivered else None
            ),
            "train_to_promised_ratio": trained / promised if trained else None,
        }


def _step_settings(source: _Source) -> Iterator[Row]:
    """Yield steps with one setting changed, after the steps they are compared with."""
    for name, stage in source.stages.items():
        if not name.startswith("step-"):
            continue
        answer = stage["answer"]
        for step in answer["steps"]:
            yield {
                "step": f"{answer['setting']}, {answer['size']} sequences,"
                f" {step['name']}",
                "step_ms": 1e3 * step["step_s"],
                "tokens_per_s": step["tokens_per_s"],
                "mfu_share": step["mfu_share"],
                **{f"{group}_ms": 1e3 * s for group, s in step["kernels_s"].items()},
                "activation_bytes": step["activation_bytes"],
            }


def _shapes(source: _Source) -> Iterator[Row]:
    """Yield the time to compile for each size, and the step times."""
    for shapes in SHAPES:
        for size in source.answer(f"shapes-{shapes}").get("sizes", ()):
            yield {
                "shapes": f"{shapes}, {size['size']} sequences",
                "first_step_s": size["first_step_s"],
                "step_ms": 1e3 * size["step_s"],
            }


def _trainings(source: _Source) -> Iterator[Row]:
    """Yield medians over the second half of each run."""
    for name, run in source.runs.items():
        if name.startswith("residual-"):
            continue
        rows = _second_half(run)
        yield {
            "training": name,
            "steps": rows[-1].step if rows else 0,
            "tokens_per_s_per_gpu": _median(run, "tokens_per_s_per_rank"),
            "mfu_share": _median(run, "mfu"),
            "mfu_6n_share": _median(run, "mfu_6n"),
            "positions_per_s": _median(run, "padded_tokens_per_s"),
            "peak_bytes": rows[-1].peak_memory_bytes if rows else None,
        }


def _trainers(source: _Source) -> Iterator[Row]:
    """Yield other trainers on the same data, and ours divided by each.

    Ours is the training of the same call, else there is no ratio.
    """
    for name in TRAINERS:
        answer = source.answer(f"trainer-{name}")
        if not answer:
            continue
        same = {
            "call": source.stages[f"trainer-{name}"]["call"],
            "stage": f"train-{answer['model']}",
        }
        ours_per_s = next(
            (
                row["tokens_per_s"]
                for row in source.references
                if same.items() <= row.items()
            ),
            None,
        )
        rate = answer["tokens_per_s"]
        yield {
            "trainer": name,
            "settings": answer["settings"],
            "batch": answer["batch"],
            "tokens_per_s": rate,
            "peak_bytes": answer["peak_bytes"],
            "ours_per_s": ours_per_s,
            "ours_to_theirs_ratio": ours_per_s / rate if ours_per_s and rate else None,
        }


def _capped(source: _Source) -> Iterator[Row]:
    """Yield memory under the cap of a smaller GPU; speed is not carried over."""
    for name, profile in source.profiles.items():
        probe = profile.evidence.probe
        if probe is None or name.endswith(f"-{source.gpu}"):
            continue
        if not _is_capped(source, name):
            continue
        yield {
            "configuration": name,
            "largest": probe.feasible_max,
            "out_of_memory": probe.infeasible_min,
            "traced": probe.traced_micro_batch_size,
            "traced_peak_bytes": probe.traced_peak_bytes,
            "peak_bytes": probe.feasible_peak_bytes,
        }


def _is_capped(source: _Source, name: str) -> bool:
    """Return whether a profile is from a stage that stands in for a smaller GPU."""
    path = f"{PROFILES}/{name}.toml"
    return any(
        stage_name.endswith("-capped") and path in stage["words"]
        for stage_name, stage in source.stages.items()
    )


def _residual_streams(source: _Source) -> Iterator[Row]:
    """Yield the losses of trainings with either dtype of the residual stream."""
    for seed in RESIDUAL_SEEDS:
        for dtype in RESIDUAL_STREAMS:
            run = source.runs.get(f"residual-{dtype}-{seed}")
            if run is None or not run.evaluations:
                continue
            losses = [row.loss for row in _second_half(run) if row.loss is not None]
            yield {
                "residual_stream": f"{dtype}, seed {seed}",
                "steps": run.steps[-1].step,
                "held_out_loss": run.evaluations[-1].loss,
                "train_loss": statistics.fmean(losses) if losses else None,
            }


def _memory(source: _Source) -> Iterator[Row]:
    """Yield the largest micro-batch and its peak, measured and predicted.

    Predictions are traced before any trial, and corrected by trials.
    """
    for name, profile in source.profiles.items():
        probe = profile.evidence.probe
        if probe is None or not source.is_probed(name):
            continue
        yield {
            "configuration": name.removesuffix(f"-{source.gpu}"),
            "traced": probe.traced_micro_batch_size,
            "largest": probe.feasible_max,
            "traced_peak_bytes": probe.traced_peak_bytes,
            "corrected_peak_bytes": probe.predicted_peak_bytes,
            "peak_bytes": probe.feasible_peak_bytes,
        }


def _own_code(source: _Source) -> Iterator[Row]:
    """Yield the largest batch of other people's training code."""
    for name, stage in source.stages.items():
        if not name.startswith("own-code-"):
            continue
        for step in stage["answer"]["profiles"]:
            evidence = step["evidence"]["probe"]
            yield {
                "example": name.removeprefix("own-code-"),
                "largest": evidence["feasible_max"],
                "trials": len(evidence["sizes"]),
                "duration_s": stage["seconds"],
            }


def _workers(source: _Source) -> Iterator[Row]:
    """Yield the chosen number of DataLoader workers, and the data wait with them."""
    for model, profile in source.tuned_models():
        sweep = profile.evidence.workers
        if sweep is None or sweep.undecided_between:
            continue
        for row in sweep.rows:
            if row.num_workers == sweep.chosen:
                yield {
                    "model": model,
                    "num_workers": sweep.chosen,
                    "data_wait_share": row.data_wait_share,
                }


def _imitations(source: _Source) -> Iterator[Row]:
    """Yield the speedup over imitations of other trainers inside this one."""
    for model, profile in source.tuned_models():
        baseline = profile.evidence.baseline
        for row in baseline.rows if baseline else ():
            if row.speedup is not None and row.name != TUNED:
                yield {
                    "compared_with": f"{model}, {row.name}",
                    "tuned_to_imitation_ratio": row.speedup,
                }


def _network(source: _Source) -> Iterator[Row]:
    """Yield predicted and measured steps of gradient synchronisation."""
    for model, profile in source.tuned_models():
        network = profile.evidence.network
        for row in network.gradient_syncs if network else ():
            if row.step_s is not None:
                yield {
                    "strategy": f"{model}, {row.strategy}",
                    "predicted_step_s": row.predicted_step_s,
                    "step_s": row.step_s,
                }


def _single(source: _Source) -> Iterator[Row]:
    """Yield figures that stand alone."""
    proof = source.answer("arithmetic")
    saves = {
        bar["name"]: bar["figure"] for bar in source.answer("saves").get("bars", ())
    }
    newcomer = source.stages.get("newcomer", {})
    for name, value in (
        ("matmul_flops_per_s", proof.get("flops_per_s")),
        ("tune_s", newcomer.get("seconds")),
        (
            "asynchronous_save_share",
            saves.get("checkpoint_stall_of_synchronous_share"),
        ),
    ):
        if value is not None:
            yield {"figure": name, "value": value}


def training_rate(run: Path) -> float | None:
    """Return the median non-padding tokens/s per GPU of a training, or None."""
    return _median(read_run(run), "tokens_per_s_per_rank")


def _second_half(run: Run) -> Sequence[Any]:
    """Return the rows of the second half of a run, which has no start-up in it."""
    return run.steps[len(run.steps) // 2 :]


def _median(run: Run, key: str) -> float | None:
    """Return the median of a value over the second half of a run."""
    values = [
        value for row in _second_half(run) if (value := getattr(row, key)) is not None
    ]
    return statistics.median(values) if values else None
