"""``python -m benchmarks.own_code``: other people's training code and its tools.

Eight subjects are probed and swept on a CPU whose memory is limited for real. Ours is
``autotune.find_batch_size``; the references are Lightning's ``BatchSizeFinder`` and
accelerate's ``find_executable_batch_size`` on the same model, batch and loss. Each is a
separate program, timed from its start to its answer, imports included; they are
interleaved. An answer is exact if two further processes run it and two run out of
memory with one sample more.

Then the same subjects are probed on a pretended GPU, where a program without autotune
must run the answer and run out of memory one above; and loaders whose answers are
known.
"""

import ast
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.base.tables import text_table
from benchmarks.bars import Bar, Direction, bars_of, finish, measuring, parser, run
from benchmarks.subjects import EXAMPLES, own_code, subjects

ROOT = Path(__file__).parents[1]
BARS: dict[str, tuple[str, Direction, float]] = {
    "own_code_exact_count": ("count", ">=", 8),
    "own_code_trials_against_lightning_ratio": ("ratio", "<=", 0.5),
    "own_code_trials_against_accelerate_ratio": ("ratio", "<=", 1 / 3),
    "own_code_seconds_against_lightning_ratio": ("ratio", "<=", 1.2),
    "own_code_added_lines_count": ("count", "<=", 8),
    "own_code_workers_right_count": ("count", ">=", 4),
    "own_code_exact_on_gpu_count": ("count", ">=", 8),
}
FIRST, PROOFS, STEPS = 1024, 2, 3
STEP_TIME_S, SLEEPS_S = 0.02, {1: 0.017, 3: 0.055, 6: 0.113}
GPU_BYTES = 2_000_000_000
TOOLS = ("autotune", "lightning", "accelerate")


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Measure, print and return the exit code."""
    options_of = parser("own_code", (__doc__ or "").splitlines()[0])
    options_of.add_argument(
        "--subjects",
        type=int,
        default=None,
        metavar="N",
        help="only the first N subjects",
    )
    options_of.add_argument(
        "--without",
        nargs="*",
        default=[],
        choices=("gpu", "workers"),
        help="parts to leave out",
    )
    options = options_of.parse_args(arguments)
    names = list(subjects())[: options.subjects]
    answers_by_subject = {name: measure(name) for name in names}
    on_gpu = (
        {}
        if "gpu" in options.without
        else {name: on_pretended_gpu(name) for name in names}
    )
    workers = {} if "workers" in options.without else measure_workers()
    lines = {
        path.stem: added_lines(path.read_text(encoding="utf-8"))
        for path in sorted(EXAMPLES.glob("*.py"))
    }
    content = {
        "subjects": answers_by_subject,
        "pretended_gpu": on_gpu,
        "workers": workers,
        "added_lines": lines,
    }
    return finish(
        options.json,
        make_bars(answers_by_subject, on_gpu, workers, lines),
        content,
        _table(answers_by_subject, on_gpu),
    )


def measure(name: str) -> dict[str, Any]:
    """Return the answers of all tools for a subject, and whether each is exact.

    The tools are called one after the other.
    """
    answers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="own-code-") as place:
        for tool in TOOLS:
            answers[tool] = _call("benchmarks.own_code", tool, name, place=place)
            sys.stderr.write(f"{name}: {tool} {answers[tool]}\n")
        for tool, answer in answers.items():
            answer["exact"] = False
            if answer["size"] and tool == "autotune":
                answer["exact"] = _call(
                    "benchmarks.own_code",
                    "prove",
                    name,
                    str(answer["size"]),
                    place=place,
                )["exact"]
            elif answer["size"]:
                tried = [
                    _call(
                        "benchmarks.own_code",
                        "plain",
                        name,
                        str(answer["size"] + more),
                        place=place,
                    )
                    for more in (0, 1)
                ]
                answer["exact"] = [trial.get("ran") for trial in tried] == [True, False]
    return answers


def _call(module: str, *words: str, place: str, **environment: str) -> dict[str, Any]:
    """Run a part of this benchmark as a program.

    Returns:
        The last line that it printed, as values, with its seconds.
    """
    began_s = time.perf_counter()
    variables = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{EXAMPLES}",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
        **environment,
    }
    process = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=place,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    seconds = time.perf_counter() - began_s
    lines = process.stdout.strip().splitlines()
    printed = (
        json.loads(lines[-1])
        if lines and lines[-1].startswith("{")
        else {"size": None, "trials": 0}
    )
    return {
        "seconds": seconds,
        **printed,
        **({} if process.returncode == 0 else {"note": process.stderr[-400:]}),
    }


def part(words: Sequence[str]) -> dict[str, Any]:
    """Run one tool on a subject, in a separate program."""
    tool, name, *more = words
    if tool == "autotune":
        return _autotune(name)
    if tool == "prove":
        return {"exact": _is_exact(name, int(more[0]))}
    if tool == "plain":
        return {"ran": _runs(name, int(more[0]))}
    return _lightning(name) if tool == "lightning" else _accelerate(name)


def _autotune(name: str) -> dict[str, Any]:
    import importlib

    from autotune import find_batch_size

    step, arguments = own_code(name)
    module, _, function = step.partition(":")
    batch_size = find_batch_size(
        getattr(importlib.import_module(module), function),
        memory=subjects()[name].memory_bytes,
        device="cpu",
        arguments=arguments,
    )
    return {
        "size": batch_size.feasible_max,
        "trials": batch_size.trials,
        "next_failed": batch_size.infeasible_min is not None,
    }


def _is_exact(name: str, size: int) -> bool:
    """Return whether a size is exact.

    Fresh processes must run it, and run out of memory with one sample more.
    """
    from autotune.memory.size_probe import FIT_STEPS_OF_CODE, step_fields
    from autotune.memory.values import StepRequest
    from autotune.subjects.bench import open_subject
    from autotune.subjects.own.subject import FunctionSubject
    from autotune.trials.fork_server import ForkServerMachine

    step, arguments = own_code(name)
    code = FunctionSubject(step_function=step, arguments=arguments)
    with open_subject("cpu", code, ROOT, import_timeout_s=300) as bench:

        def run(tried: int, limit_bytes: int | None) -> Any:
            request = StepRequest(
                **step_fields(
                    code,
                    {"micro_batch_size": tried},
                    FIT_STEPS_OF_CODE,
                    device="cpu",
                    local_ranks=1,
                ),
                memory_budget_bytes=limit_bytes,
            )
            return bench.machine.run(bench.trial(request, 300))

        assert isinstance(bench.server, ForkServerMachine)
        bench.server.load(run(1, None).figures["imported"])  # not memory of the step
        budget = subjects()[name].memory_bytes
        kinds = {
            tried: {run(tried, budget).kind for _ in range(PROOFS)}
            for tried in (size, size + 1)
        }
    return kinds == {size: {"measured"}, size + 1: {"out_of_memory"}}


def _limit(name: str) -> None:
    """Limit this process as a trial of autotune's is limited."""
    import torch

    from autotune.trials.jobs.budget import enforce
    from autotune.trials.jobs.cpu_allocators import keep_one_arena
    from trainer.runtime.ranks import Ranks, warm_up_libraries

    keep_one_arena()
    # Whatever they import.
    subjects()[name].loss(
        subjects()[name].model(), subjects()[name].batch(1)
    ).backward()
    cpu = torch.device("cpu")
    warm_up_libraries(
        Ranks(rank=0, local_rank=0, local_world_size=1, world_size=1, device=cpu)
    )
    enforce(subjects()[name].memory_bytes, cpu, None, large_block_bytes=32 * 1024)


def _lightning(name: str) -> dict[str, Any]:
    import lightning.pytorch as lightning
    import torch
    from lightning.pytorch.tuner.tuning import Tuner

    subject, tried = subjects()[name], []

    class Batches(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return STEPS * 2**14

        def __getitems__(self, places: Sequence[int]) -> Any:
            return subject.batch(len(places))

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.batch_size = subject.model(), 2

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(
                Batches(), batch_size=self.batch_size, collate_fn=lambda batch: batch
            )

        def on_train_start(self) -> None:
            tried.append(self.batch_size)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return subject.loss(self.network, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    _limit(name)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    size = Tuner(trainer).scale_batch_size(
        Module(), mode="binsearch", steps_per_trial=STEPS, margin=0.0, max_val=2**14
    )
    return {"size": size, "trials": len(tried)}


def _train(name: str, batch_size: int) -> None:
    """Take the steps of a plain loop."""
    import torch

    subject = subjects()[name]
    model = subject.model()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        subject.loss(model, subject.batch(batch_size)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _runs(name: str, size: int) -> bool:
    """Return whether this process has the memory for a size.

    It has run nothing else.
    """
    _limit(name)
    try:
        _train(name, size)
    except (RuntimeError, MemoryError):
        return False
    return True


def _accelerate(name: str) -> dict[str, Any]:
    from accelerate.utils import find_executable_batch_size

    tried = []

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        _train(name, batch_size)
        return batch_size

    _limit(name)
    size = find_executable_batch_size(train, starting_batch_size=FIRST)()
    return {"size": size, "trials": len(tried)}


def on_pretended_gpu(name: str) -> dict[str, Any]:
    """Return autotune's answer on a pretended GPU, and its check.

    A program without autotune runs the answer and one sample more.
    """
    from testbed.nullgpu.environment import find
    from testbed.nullgpu.machine import Machine

    environment = find()
    if environment is None:
        return {"size": None, "note": "make .venv-cuda/.made"}
    step, arguments = own_code(name, on_gpu=True)
    (given,) = arguments.items()
    with tempfile.TemporaryDirectory(prefix="own-code-") as place:
        machine = Machine(
            environment=environment,
            folder=Path(place),
            memory=GPU_BYTES,
            variables={"PYTHONPATH": str(ROOT)},
        )
        words = (
            "probe",
            "--step",
            step,
            "--set",
            "=".join(given),
            "--memory",
            f"{GPU_BYTES}B",
            "--json",
        )
        ended = machine.autotune(*words, "--out", place, "--reports", place)
        if ended.code:
            return {"size": None, "note": ended.err[-400:]}
        evidence = json.loads(ended.out)["profiles"][0]["evidence"]["probe"]
        endings = [
            machine.run("-m", "benchmarks.alone", step, str(size), "=".join(given))
            .out.strip()
            .splitlines()[-1:]
            for size in (evidence["feasible_max"], evidence["feasible_max"] + 1)
        ]
    answer = {
        "size": evidence["feasible_max"],
        "trials": len(evidence["sizes"]),
        "said": endings,
    }
    sys.stderr.write(f"{name} on a pretended GPU: {answer}\n")
    return answer | {
        "exact": endings[0] == ["ran"]
        and endings[1] in (["out of memory"], ["retried"])
    }


def measure_workers() -> dict[str, Any]:
    """Return what ``find_num_workers`` answers for loaders whose answers are known."""
    from autotune import find_num_workers
    from benchmarks import loaders

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="own-code-") as place:
        for answer, sleep_s in SLEEPS_S.items():
            result = find_num_workers(
                loaders.sleeping,
                step_time=STEP_TIME_S,
                arguments={"sleep_s": sleep_s},
                max_workers=8,
                time_limit="3min",
                window="1s",
                reports=place,
            )
            results[f"sleeping, {answer}"] = _judged(answer, result)
        rates = loaders.tokenised_rates()
        # Which one worker keeps up with, and this process alone does not.
        step_s = 1 / (0.9 * rates[1])
        result = find_num_workers(
            loaders.tokenised,
            step_time=step_s,
            max_workers=2,
            time_limit="3min",
            window="1s",
            reports=place,
        )
        results["tokenised"] = _judged(1, result) | {"batches_per_s": rates}
    return results


def _judged(answer: int, result: Any) -> dict[str, Any]:
    within = result.undecided_between or (result.value, result.value)
    right = within[0] <= answer <= within[-1] and (
        bool(result.undecided_between) or result.value == answer
    )
    judgement = {
        "answer": answer,
        "said": result.value,
        "undecided_between": list(result.undecided_between),
        "right": right,
    }
    sys.stderr.write(f"workers: {judgement}\n")
    return judgement


def added_lines(source: str) -> int:
    """Return the lines of a script that are there for autotune.

    They are its imports, and the functions that it calls.
    """
    tree = ast.parse(source)
    lines = {
        node.lineno
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and "autotune" in (node.module or "")
    }
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in (
            "build_step",
            "build_loader",
        ):
            # Its docstring is not needed.
            code = [
                statement
                for statement in node.body
                if not isinstance(statement, ast.Expr)
            ]
            lines |= {
                node.lineno,
                *(
                    line
                    for statement in code
                    for line in range(statement.lineno, (statement.end_lineno or 0) + 1)
                ),
            }
    return len(lines)


def make_bars(
    answers_by_subject: Mapping[str, Any],
    on_gpu: Mapping[str, Any],
    workers: Mapping[str, Any],
    lines: Mapping[str, int],
) -> list[Bar]:
    """Return ratios of ours to each reference, and counts.

    The ratios are medians over the subjects that the reference answered.
    """

    def ratio(figure: str, tool: str) -> float | None:
        known = [
            by_tool["autotune"][figure] / by_tool[tool][figure]
            for by_tool in answers_by_subject.values()
            if by_tool[tool]["size"]
        ]
        return statistics.median(known) if known else None

    figures: dict[str, float | None] = {
        "own_code_exact_count": sum(
            bool(by_tool["autotune"].get("exact"))
            for by_tool in answers_by_subject.values()
        ),
        "own_code_trials_against_lightning_ratio": ratio("trials", "lightning"),
        "own_code_trials_against_accelerate_ratio": ratio("trials", "accelerate"),
        "own_code_seconds_against_lightning_ratio": ratio("seconds", "lightning"),
        "own_code_added_lines_count": max(lines.values()),
        "own_code_workers_right_count": (
            sum(result["right"] for result in workers.values()) if workers else None
        ),
        "own_code_exact_on_gpu_count": (
            sum(bool(answer.get("exact")) for answer in on_gpu.values())
            if on_gpu
            else None
        ),
    }
    return bars_of(BARS, figures)


def _table(answers_by_subject: Mapping[str, Any], on_gpu: Mapping[str, Any]) -> str:
    rows: list[list[str | None]] = []
    for name, answers in answers_by_subject.items():
        for tool in TOOLS:
            answer = answers[tool]
            exact = (
                "exact"
                if answer.get("exact")
                else "not exact"
                if answer["size"]
                else "no answer"
            )
            rows.append(
                [
                    name,
                    tool,
                    str(answer["size"] or ""),
                    exact,
                    str(answer["trials"]),
                    f"{answer['seconds']:.1f} s",
                ]
            )
        if name in on_gpu:
            gpu = on_gpu[name]
            exact = "exact" if gpu.get("exact") else "not exact"
            rows.append(
                [
                    name,
                    "autotune, pretended GPU",
                    str(gpu["size"]),
                    exact,
                    str(gpu.get("trials", "")),
                    None,
                ]
            )
    return text_table(
        ("subject", "tool", "size", "", "trials", "time"), rows, align="llrlrr"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1 and re.fullmatch(
        r"autotune|lightning|accelerate|prove|plain", sys.argv[1]
    ):
        sys.stdout.write(
            "\n"
            + json.dumps(part(sys.argv[1:]), allow_nan=False, default=math.floor)
            + "\n"
        )
        sys.exit(0)
    run(main)
