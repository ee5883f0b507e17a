"""A trial of several ranks: real processes, real gloo, real limits."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from autotune.errors import MachineLacks
from autotune.memory.size_probe import StepCounts, step_fields
from autotune.memory.values import StepRequest
from autotune.subjects.mlm.subject import MlmSubject
from autotune.trials.job_figures import StepFigures
from autotune.trials.outcomes import Crashed, Measured, OutOfMemory, TimedOut
from autotune.trials.values import Trial
from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import TrainConfig

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[3]
TINY = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}
VOCAB_SIZE = 2048
SEQ_LENGTH_TOKENS = 256
TIME_LIMIT_S = 600.0
RANK_WAITS_S = 86400.0
"""Time that a rank waits for another one: longer than any trial lasts. So a trial whose
ranks the server did not end would be timed out, and its test would fail."""
AMPLE_BYTES = 2**30
SMALL_BYTES = 16 * 2**20
"""Memory budget that is too small for ``TINY`` with any micro-batch."""


def step_request(
    micro_batch_size: int = 2,
    local_ranks: int = 2,
    budget_bytes: int = AMPLE_BYTES,
    parallel: Mapping[str, Any] = MappingProxyType({}),
    **config,
) -> dict:
    """Return the measured input of a ``step`` job; ``config`` are further settings."""
    settings = {
        "model": {"name": "tiny", "config": TINY},
        "seq_length_tokens": SEQ_LENGTH_TOKENS,
        "micro_batch_size": micro_batch_size,
        "global_batch_size": micro_batch_size * local_ranks,
        "layout": "packed",
        "device": "cpu",
        "parallel": {"timeout_s": RANK_WAITS_S, **parallel},
    } | config
    subject = MlmSubject(
        config=TrainConfig.model_validate(settings),
        vocab_size=VOCAB_SIZE,
        special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
        local_ranks=local_ranks,
    )
    fields = step_fields(
        subject,
        {"micro_batch_size": micro_batch_size},
        StepCounts(warmup=1, timed=2),
        device=settings["device"],
        local_ranks=local_ranks,
    )
    request = StepRequest(**fields, memory_budget_bytes=budget_bytes)
    return request.trial(timeout_s=TIME_LIMIT_S).measured


@pytest.fixture
def run(started_server):
    """Return a function that runs a step, and checks that it leaves no process.

    Its ``local`` inputs are faults and budgets of single ranks, for the failing job.
    """

    def run_trial(measured: dict, timeout_s: float = TIME_LIMIT_S, **local):
        trial = Trial(
            job="testbed.failing_job" if local else "step",
            measured=measured,
            local=local | {"limit_s": timeout_s},
            timeout_s=timeout_s,
        )
        outcome = started_server.run(trial)
        assert psutil.Process(started_server._server.pid).children(recursive=True) == []
        return outcome

    return run_trial


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp2"])
def test_ranks_that_fit_give_one_set_of_figures(run, strategy):
    outcome = run(step_request(parallel={"strategy": strategy}))
    assert isinstance(outcome, Measured), outcome
    figures = StepFigures.of(outcome)
    assert figures.local_ranks == 2
    assert figures.steps == figures.optimizer_steps == 3
    assert len(figures.step_s) == 2
    # Two ranks, each with a micro-batch of two sequences.
    assert figures.units_per_step == 2 * 2 * SEQ_LENGTH_TOKENS
    assert len(outcome.figures["peak_bytes_by_rank"]) == 2
    assert figures.peak_bytes == max(outcome.figures["peak_bytes_by_rank"]) > 0


def test_communication_memory_does_not_count(run):
    alone = run(step_request(micro_batch_size=8, local_ranks=1)).figures
    both = run(step_request(micro_batch_size=8, local_ranks=2)).figures
    # The ranks do the same work as one does alone, on other random tokens.
    assert both["loss"] == pytest.approx(alone["loss"], rel=0.05)
    # Gradient buckets count, as they are the training's own.
    assert both["peak_bytes"] == pytest.approx(alone["peak_bytes"], rel=0.15)


@pytest.mark.parametrize(
    ("budgets_bytes", "detail"),
    [
        pytest.param((SMALL_BYTES, SMALL_BYTES), "", id="both"),
        pytest.param((SMALL_BYTES, AMPLE_BYTES), "rank 0 of 2: ", id="first"),
        pytest.param((AMPLE_BYTES, SMALL_BYTES), "rank 1 of 2: ", id="second"),
    ],
)
def test_rank_without_memory_is_named(run, budgets_bytes, detail):
    outcome = run(step_request(), budget_bytes_by_rank=budgets_bytes)
    assert isinstance(outcome, OutOfMemory), outcome
    assert outcome.detail.startswith(detail)


def test_hanging_rank_ends_the_trial_at_its_limit(run):
    outcome = run(step_request(), timeout_s=3, fault_by_rank={"1": "hang"})
    assert isinstance(outcome, TimedOut)
    # With the place at which the other rank waits for it.
    assert outcome.detail.startswith("killed after 3 s:\n  File")


@pytest.mark.parametrize(
    ("faults", "detail"),
    [
        pytest.param({"0": "crash"}, "rank 0 of 2: .*on purpose", id="first"),
        pytest.param({"1": "crash"}, "rank 1 of 2: .*on purpose", id="second"),
        pytest.param(
            {"0": "signal"}, "rank 0 of 2: .*exit code -11", id="first, signal"
        ),
        pytest.param(
            {"1": "signal"}, "rank 1 of 2: .*exit code -11", id="second, signal"
        ),
        pytest.param(
            {"0": "hang", "1": "crash"},
            "rank 1 of 2: .*on purpose",
            id="second, the first never notices",
        ),
    ],
)
def test_crashed_rank_ends_the_trial(run, faults, detail):
    outcome = run(step_request(), fault_by_rank=faults)
    assert isinstance(outcome, Crashed)
    assert re.match(detail, outcome.detail, re.DOTALL)


def test_ranks_require_their_gpus(run):
    # No host has so many GPUs.
    with pytest.raises(MachineLacks, match="GPU"):
        run(step_request(device="cuda", local_ranks=17))


@pytest.mark.soak
def test_torchrun_has_the_same_largest_micro_batch(run, tmp_path):
    # Halfway between the needs of two sizes, so that no byte of chance moves the limit.
    needed_bytes = [run(step_request(size)).figures["peak_bytes"] for size in (6, 7)]
    budget_bytes = sum(needed_bytes) // 2

    def request(micro_batch_size):
        return step_request(micro_batch_size, budget_bytes=budget_bytes)

    # The peak without a limit may differ from that under it, so the largest size is
    # searched for from below.
    too_small = 5
    largest = too_small
    while isinstance(run(request(largest + 1)), Measured):
        largest += 1
    assert largest > too_small
    assert isinstance(run(request(largest + 1)), OutOfMemory)
    fitting = _statuses_under_torchrun(request(largest), tmp_path / "fits")
    assert fitting == {"measured"}
    too_large = _statuses_under_torchrun(request(largest + 1), tmp_path / "too-large")
    assert "out_of_memory" in too_large
    # torchrun ends a rank that waits for the other one, which may have noticed by then.
    assert too_large <= {"out_of_memory", "lost_peer"}


def _statuses_under_torchrun(measured: dict, directory: Path) -> set[str]:
    """Run the ranks of a step job under torchrun; return the statuses they wrote."""
    directory.mkdir()
    trial_file = directory / "trial.json"
    trial_file.write_text(json.dumps(measured))
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    ]
    job = ["-m", "testbed.failing_job", str(trial_file), str(directory)]
    process = subprocess.run(
        [*torchrun, *job],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
    )
    statuses = {
        json.loads(file.read_text())["status"] for file in directory.glob("rank-*.json")
    }
    assert statuses, process.stderr[-3000:]
    has_measured = statuses == {"measured"}
    assert (process.returncode == 0) == has_measured, process.stderr[-3000:]
    return statuses
