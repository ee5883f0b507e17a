from dataclasses import replace
from pathlib import Path

from autotune.core.hardware import GpuFacts, SlurmFacts
from autotune.core.outcome import Measured
from autotune.core.trial import FeedFigures, GpuUseFigures
from autotune.search.gpu_source import gpu_source
from autotune.search.site import Site
from tests.autotune.core.test_trial import FEED
from tests.fakes import FakeHost

ON_CPU = Site(
    device="cpu",
    gpus=(),
    host=FakeHost().facts([Path()]),
    slurm=SlurmFacts(job_id=None, end_time_s=None, nodes=None, tasks=None, gpus_per_node=None, commands=()),
    versions={},
    gpu_absent="no driver",
    device_used_bytes=None,
)
H200 = GpuFacts(
    uuid="GPU-1", index=0, name="NVIDIA H200", total_bytes=2**37, mig_enabled=False, power_cap_w=700.0,
    compute_mode="default", driver="580.1", compute_capability=(9, 0),
)  # fmt: skip
ON_GPU = replace(ON_CPU, device="cuda", gpus=(H200,), gpu_absent=None)


def window(**use) -> FeedFigures:
    return replace(FeedFigures.of(Measured(figures=FEED)), gpus=(GpuUseFigures(**use),))


def test_without_a_gpu_the_reason_is_told():
    assert gpu_source(ON_CPU, [], replayed=False) == "n/a (CPU run: no driver)"
    assert gpu_source(ON_GPU, [], replayed=True) == "n/a (its step was replayed on this CPU)"


def test_both_sources_are_named_with_what_they_do_not_mean():
    found = gpu_source(ON_GPU, [window(samples=3, utilisation_share=0.9, gpm_windows=1)], replayed=False)
    assert found.startswith("NVIDIA H200; NVML utilisation")
    assert "it is not MFU" in found
    assert "GPM counters" in found
    assert "n/a" not in found


def test_a_source_that_is_missing_says_why():
    found = gpu_source(ON_GPU, [window(samples=3, gpm_lacking="no Hopper")], replayed=False)
    assert "GPM: n/a (no Hopper)" in found
    assert "NVML utilisation: n/a (lost)" in gpu_source(ON_GPU, [window(lacking="lost", gpm_windows=1)], replayed=False)
    assert "NVML utilisation: n/a (nothing was sampled)" in gpu_source(ON_GPU, [], replayed=False)
