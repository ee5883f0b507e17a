"""A trial of several ranks: real processes, real gloo, real limits; and the same ranks
under torchrun."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autotune.errors import MachineLacks
from autotune.trials.jobs.server import GRACE_S
from autotune.trials.values import (
    Crashed,
    Measured,
    OutOfMemory,
    StepFigures,
    TimedOut,
    Trial,
)

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[3]
TINY = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}
AMPLE_BYTES, SMALL_BYTES = 2**30, 16 * 2**20


def measured(
    rows: int = 2, local_ranks: int = 2, budget_bytes: int = AMPLE_BYTES, **config
) -> dict:
    settings = {
        "model": {"name": "tiny", "config": TINY},
        "seq_length_tokens": 256,
        "micro_batch_size": rows,
        "global_batch_size": rows * local_ranks,
        "layout": "packed",
        "device": "cpu",
    }
    return {
        "config": settings | config,
        "vocab_size": 2048,
        "memory_budget_bytes": budget_bytes,
        "special_ids": {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4},
        "warmup_steps": 1,
        "timed_steps": 2,
        "local_ranks": local_ranks,
        "documents_per_sequence": 1.0,
    }


@pytest.fixture
def run(started_server):
    """Runs a step trial, and sees to it that nothing is left of it."""

    def run_trial(what: dict, timeout_s: float = 120, **place):
        job = "testbed.failing_job" if place else "step"
        outcome = started_server.run(
            Trial(job=job, measured=what, local=place, timeout_s=timeout_s)
        )
        assert psutil.Process(started_server._server.pid).children(recursive=True) == []
        return outcome

    return run_trial


@pytest.fixture
def promptly():
    """Far below the trial's limit: a rank that nobody ends waits for ten minutes."""
    started_s = time.monotonic()
    yield
    assert time.monotonic() - started_s < GRACE_S + 8


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp2"])
def test_ranks_that_fit_give_one_set_of_figures(run, strategy):
    outcome = run(measured(parallel={"strategy": strategy}))
    assert isinstance(outcome, Measured), outcome
    figures = StepFigures.of(outcome)
    assert figures.local_ranks == 2
    assert figures.optimizer_steps == 3
    assert len(figures.step_s) == 2
    assert figures.padded_tokens_per_step == 2 * 2 * 256
    assert len(outcome.figures["peak_bytes_by_rank"]) == 2
    assert figures.peak_bytes == max(outcome.figures["peak_bytes_by_rank"]) > 0


def test_two_ranks_have_one_loss_and_what_they_need_to_talk_is_not_counted_as_the_models(
    run,
):
    alone, both = (run(measured(rows=8, local_ranks=ranks)).figures for ranks in (1, 2))
    assert both["loss"] == pytest.approx(alone["loss"], rel=0.05)
    assert both["peak_bytes"] == pytest.approx(alone["peak_bytes"], rel=0.15)


@pytest.mark.parametrize(
    ("budgets", "detail"),
    [
        ((SMALL_BYTES, SMALL_BYTES), ""),
        ((SMALL_BYTES, AMPLE_BYTES), "rank 0 of 2: "),
        ((AMPLE_BYTES, SMALL_BYTES), "rank 1 of 2: "),
    ],
)
def test_a_refused_rank_is_out_of_memory_and_named_unless_all_are(
    run, promptly, budgets, detail
):
    outcome = run(measured(), budget_bytes_by_rank=budgets)
    assert isinstance(outcome, OutOfMemory), outcome
    assert outcome.detail.startswith(detail)


def test_a_rank_that_hangs_ends_the_trial_at_its_limit(run, promptly):
    outcome = run(measured(), timeout_s=3, fault_by_rank={"1": "hang"})
    assert outcome == TimedOut(detail="killed after 3 s")


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"0": "crash"}, "rank 0 of 2: .*on purpose"),
        ({"1": "crash"}, "rank 1 of 2: .*on purpose"),
        ({"0": "signal"}, "rank 0 of 2: .*exit code -11"),
        ({"1": "signal"}, "rank 1 of 2: .*exit code -11"),
        # The other never notices.
        ({"0": "hang", "1": "crash"}, "rank 1 of 2: .*on purpose"),
    ],
)
def test_a_rank_that_crashes_is_named_and_ends_the_trial(run, promptly, faults, said):
    outcome = run(measured(), timeout_s=600, fault_by_rank=faults)
    assert isinstance(outcome, Crashed)
    assert re.match(said, outcome.detail, re.DOTALL)


def test_ranks_without_their_device_lack_a_machine(run, promptly):
    with pytest.raises(MachineLacks, match="GPU"):
        run(measured(device="cuda", local_ranks=17))


@pytest.mark.soak
def test_the_largest_micro_batch_is_the_same_under_torchrun(run, tmp_path):
    # Halfway between what two sizes need, so that no byte of chance moves the edge.
    needs = [run(measured(rows)).figures["peak_bytes"] for rows in (6, 7)]
    budget_bytes = sum(needs) // 2
    largest = 5
    while isinstance(run(measured(largest + 1, budget_bytes=budget_bytes)), Measured):
        largest += 1
    assert largest > 5
    assert isinstance(
        run(measured(largest + 1, budget_bytes=budget_bytes)), OutOfMemory
    )
    assert _under_torchrun(
        measured(largest, budget_bytes=budget_bytes), tmp_path / "fits"
    ) == {"measured"}
    refused = _under_torchrun(
        measured(largest + 1, budget_bytes=budget_bytes), tmp_path / "refused"
    )
    assert "out_of_memory" in refused
    # torchrun ends a rank that waits for the refused one; it may have noticed by then.
    assert refused <= {"out_of_memory", "lost_peer"}


def _under_torchrun(what: dict, out: Path) -> set[str]:
    """How the ranks ended that wrote of their end."""
    out.mkdir()
    trial = out / "trial.json"
    trial.write_text(json.dumps(what))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    ]
    job = ["-m", "testbed.failing_job", str(trial), str(out)]
    ended = subprocess.run(
        [*command, *job],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
    )
    found = {json.loads(file.read_text())["status"] for file in out.glob("rank-*.json")}
    assert found, ended.stderr[-3000:]
    assert (ended.returncode == 0) == (found == {"measured"})
    return found
