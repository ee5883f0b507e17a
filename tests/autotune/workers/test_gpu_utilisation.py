"""Contradictions between GPU utilisation and throughput in a sweep."""

from dataclasses import replace

import pytest

from autotune.base.render_console import console_text
from autotune.evidence.gpu_use import GpuUse
from autotune.evidence.workers import WorkersRow
from autotune.workers.decide.gpu_utilisation import utilisation_finding
from autotune.workers.sections import sweep_blocks
from testbed.examples.feeds import ON_CPU, FeedMachine, evidence_of, knee_at, sweep_on
from testbed.examples.gpu_facts import H200

ON_GPU = replace(ON_CPU, device="cuda", gpus=(H200,), gpu_absent=None)


def row(ratio, busy_share, *, wait_share=0.0, high=None):
    """Return the result of four workers."""
    gpu = None if busy_share is None else GpuUse(utilisation_share=busy_share)
    return WorkersRow(
        num_workers=4,
        units_per_s=[1.0],
        ratio_to_cached=ratio,
        ratio_low=ratio - 0.01,
        ratio_high=ratio + 0.01 if high is None else high,
        verdict="verified",
        data_wait_share=wait_share,
        gpu=gpu,
    )


def find(row, *, keeps_up, cached=None):
    return utilisation_finding(row, keeps_up=keeps_up, cached_utilisation_share=cached)


def test_idle_gpu_at_the_upper_bound_is_found():
    finding = find(row(0.995, 0.71), keeps_up=True, cached=0.72)
    assert finding.kind == "idle at the upper bound"
    assert finding.utilisation_share == 0.71
    assert finding.claim.startswith(
        "the GPU is busy only 71 % of the time (72 % on cached batches), although"
        " num_workers=4 reaches the upper bound"
    )
    assert "autotune advise" in finding.next_step


def test_idle_gpu_below_the_upper_bound_is_expected():
    assert find(row(0.7, 0.71, wait_share=0.3), keeps_up=False) is None


def test_busy_gpu_that_waits_for_data_is_found():
    finding = find(row(0.8, 1.0, wait_share=0.18), keeps_up=False)
    assert finding.kind == "busy below the upper bound"
    assert "reaches only 80 % of the upper bound" in finding.claim
    assert "it waits for data 18 % of the time" in finding.claim
    assert "faster data loading" in finding.next_step


def test_busy_gpu_with_slower_kernels_is_told_apart():
    finding = find(row(0.8, 1.0, wait_share=0.01), keeps_up=False)
    assert "its kernels are slower" in finding.claim
    assert "autotune doctor" in finding.next_step


@pytest.mark.parametrize(
    ("ratio", "busy_share", "keeps_up"),
    [
        pytest.param(0.99, 0.95, True, id="busy at the upper bound"),
        pytest.param(0.8, 0.95, False, id="not always busy below it"),
        pytest.param(0.8, None, False, id="without a GPU"),
    ],
)
def test_agreement_is_no_finding(ratio, busy_share, keeps_up):
    assert find(row(ratio, busy_share), keeps_up=keeps_up) is None


def test_rate_near_the_bound_is_no_finding():
    assert find(row(0.97, 1.0, high=0.99), keeps_up=False) is None


def swept(tmp_path, site, **changes):
    """Return the evidence of a sweep in which two workers suffice."""
    return evidence_of(sweep_on(FeedMachine(knee_at(2), **changes), tmp_path), site)


def test_sweep_tells_the_finding_in_console_and_json(tmp_path):
    evidence = swept(tmp_path, ON_GPU, gpus=[{"utilisation_share": 0.7}])
    finding = evidence.utilisation_finding
    assert finding.kind == "idle at the upper bound"
    text = " ".join(console_text(sweep_blocks(evidence)).split())
    # The list of notes begins with capitals.
    assert finding.sentence.removeprefix("the") in text
    dumped = evidence.model_dump(mode="json")["utilisation_finding"]
    assert dumped["utilisation_share"] == 0.7


def test_sweep_on_a_cpu_says_nothing(tmp_path):
    evidence = swept(tmp_path, ON_CPU)
    assert evidence.utilisation_finding is None
    assert "upper bound: it" not in console_text(sweep_blocks(evidence))
