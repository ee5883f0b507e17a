import pytest

from autotune.core.outcome import Crashed, Measured, OutOfMemory
from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.rig import TimeBox, TrialFailed
from benchmarks.gpu.check.sizes import FULL
from benchmarks.gpu.stage import ranks
from tests.benchmarks.gpu.rigs import facts, make_rig

NCCL_BYTES = 700 * 2**20


def node(refusal):
    """Two GPUs on which NCCL takes 700 MiB of each."""

    def simulate(trial):
        together = trial.measured["local_ranks"]
        if "budget_bytes_by_rank" in trial.place:
            return refusal
        outside = 2**29 + (NCCL_BYTES if together > 1 else 0)
        return Measured(
            figures={
                "optimizer_steps": 6, "step_s": [0.1], "slot_tokens_per_step": 4096, "loss": 10.0,
                "peak_bytes": 2**33 + outside, "outside_allocator_bytes": outside, "local_ranks": together,
                "peak_bytes_by_rank": [2**33 + outside] * together,
            }
        )  # fmt: skip

    return simulate


def measured(tmp_path, monkeypatch, refusal):
    monkeypatch.setattr(ranks, "_write_links", lambda *_: None)
    rig = make_rig(tmp_path, node(refusal), gpu=facts(), sizes=FULL)
    rig.nproc = 2
    sheet = Sheet()
    ranks.measure(rig, sheet, TimeBox(clock=rig.clock, end_s=rig.clock.monotonic_s() + 60))
    return {figure.name: figure.value for figure in sheet.figures}, rig.machine.trials


def test_what_communication_takes_is_what_several_ranks_take_more(tmp_path, monkeypatch):
    figures, trials = measured(tmp_path, monkeypatch, OutOfMemory(detail="rank 1 of 2: CUDA out of memory"))
    assert figures["communication_outside_allocator_bytes"] == NCCL_BYTES
    assert figures["one_rank_out_of_memory_named_count"] == 1
    budgets = trials[-1].place["budget_bytes_by_rank"]
    assert budgets[1] < 2**33 < budgets[0]


def test_a_refusal_that_names_no_rank_is_told(tmp_path, monkeypatch):
    figures, _ = measured(tmp_path, monkeypatch, OutOfMemory(detail="CUDA out of memory"))
    assert figures["one_rank_out_of_memory_named_count"] == 0


def test_one_rank_out_of_memory_must_not_look_like_a_crash(tmp_path, monkeypatch):
    with pytest.raises(TrialFailed, match="out of memory"):
        measured(tmp_path, monkeypatch, Crashed(detail="NCCL timed out"))
