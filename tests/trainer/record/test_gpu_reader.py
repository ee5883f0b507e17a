"""Reading GPU activity in a thread while a run trains."""

import threading
from dataclasses import replace

import pytest
import torch

from testbed.fakes import GPM_WINDOW, GPU_FACTS, SAMPLE, FakeGpu, FakeGpuMonitor
from trainer.formats.gpu_activity import GPU_ACTIVITY_VARIABLE, GpuActivity
from trainer.formats.gpus import GpuSample, Unavailable
from trainer.record.gpu_reader import GpuReader, open_gpu_reader
from trainer.runtime.ranks import Ranks

WITHIN_S = 60.0
"""Timeout of what takes milliseconds."""
UUIDS = ("GPU-0", "GPU-1")
COUNTERS = "sm_active_share, tensor_active_share, dram_active_share"


class WatchedMonitor(FakeGpuMonitor):
    """Scripted GPUs; ``read`` is set once each GPU was read this often."""

    def __init__(self, script, *, readings: int = 4, **options) -> None:
        super().__init__(script, **options)
        self._due = readings * len(script)
        self.read = threading.Event()
        self.is_closed = False

    def gpm(self, uuid):
        window = super().gpm(uuid)
        self._due -= 1
        if self._due <= 0:
            self.read.set()
        return window

    def close(self) -> None:
        super().close()
        self.is_closed = True


def gpu_of(uuid: str = UUIDS[0], **changes) -> FakeGpu:
    """Return a scripted GPU that has all figures."""
    facts = replace(GPU_FACTS, uuid=uuid)
    return FakeGpu(
        **{"facts": facts, "samples": [SAMPLE], "gpm": [GPM_WINDOW]} | changes
    )


def two_ranks(*, rank: int = 0) -> Ranks:
    return Ranks(
        rank=rank,
        local_rank=rank,
        local_world_size=2,
        world_size=2,
        device=torch.device("cpu"),
    )


def open_two(monitor, **environment) -> GpuReader:
    """Return the reader of two ranks, of a GPU each."""
    return open_gpu_reader(two_ranks(), UUIDS, monitor, environment)


def activity_read(monitor: WatchedMonitor) -> dict[int, GpuActivity]:
    """Read the GPUs of two ranks a few times, and return their activity."""
    reader = GpuReader(dict(enumerate(UUIDS)), monitor, read_every_s=0.001)
    reader.start()
    assert monitor.read.wait(WITHIN_S)
    reader.close()
    return reader.take()


def test_activity_is_that_of_each_ranks_gpu():
    idle = gpu_of(
        UUIDS[1],
        samples=[replace(SAMPLE, utilisation=0.25, power_w=80.0)],
        gpm=[replace(GPM_WINDOW, sm_utilisation=0.125, dram_active=None)],
    )
    busy, slow = activity_read(WatchedMonitor([gpu_of(), idle])).values()
    assert busy == GpuActivity(
        busy_share=0.75,
        memory_busy_share=0.1,
        sm_active_share=0.9,
        tensor_active_share=0.4,
        dram_active_share=0.3,
        power_w=312.5,
        sm_clock_mhz=1700,
    )
    assert (slow.busy_share, slow.power_w) == (0.25, 80.0)
    assert (slow.sm_active_share, slow.dram_active_share) == (0.125, None)


def test_readings_are_taken_once():
    monitor = WatchedMonitor([gpu_of()])
    reader = GpuReader({0: UUIDS[0]}, monitor, read_every_s=0.001)
    reader.start()
    assert monitor.read.wait(WITHIN_S)
    reader.close()
    assert reader.take()[0].busy_share == 0.75
    assert reader.take() == {0: GpuActivity()}


def test_only_figures_of_rows_are_read():
    samples = []

    class Keeping(WatchedMonitor):
        def sample(self, uuid, figures=None):
            samples.append(super().sample(uuid, figures))
            return samples[-1]

    activity_read(Keeping([gpu_of(uuid) for uuid in UUIDS]))
    assert all(isinstance(sample, GpuSample) for sample in samples)
    # Listing processes takes long on some drivers.
    assert {(sample.process_count, sample.used_bytes) for sample in samples} == {
        (None, None)
    }


def test_complete_readings_have_no_reasons():
    reader = open_two(FakeGpuMonitor([gpu_of(uuid) for uuid in UUIDS]))
    assert reader.missing == ()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param((), "the script has no GPU", id="no NVML"),
        pytest.param((gpu_of("GPU-7"),), "NVML lists no GPU GPU-0", id="another GPU"),
        pytest.param(
            (
                gpu_of(
                    facts=replace(
                        GPU_FACTS, mig_enabled=True, mig_uuids=("MIG-0", "MIG-1")
                    )
                ),
            ),
            "MIG is on",
            id="MIG",
        ),
        pytest.param(
            (gpu_of(facts=replace(GPU_FACTS, uuid="GPU-9", mig_enabled=True)),),
            "MIG is on",
            id="MIG, by the UUID of a slice",
        ),
    ],
)
def test_unreadable_gpus_have_one_reason(script, reason):
    reader = open_gpu_reader(
        Ranks(
            rank=0,
            local_rank=0,
            local_world_size=1,
            world_size=1,
            device=torch.device("cpu"),
        ),
        UUIDS[:1],
        FakeGpuMonitor(script),
        {},
    )
    (missing,) = reader.missing
    assert missing.startswith(reason)
    reader.start()
    reader.close()
    assert reader.take() == {0: GpuActivity()}


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        pytest.param(
            {"first_gpm": [Unavailable(reason="no Hopper")]},
            (f"{COUNTERS}: no Hopper",),
            id="no counters",
        ),
        pytest.param(
            {
                "samples": [
                    replace(
                        SAMPLE,
                        utilisation=None,
                        memory_utilisation=None,
                        power_w=None,
                        missing={
                            "utilisation": "no permission",
                            "memory_utilisation": "no permission",
                            "power_w": "not counted, but the energy is",
                        },
                    )
                ]
            },
            ("gpu_busy_share, memory_busy_share: no permission",),
            id="no permission",
        ),
        pytest.param(
            {
                "samples": [Unavailable(reason="lost")],
                "first_gpm": [Unavailable(reason="lost")],
            },
            (
                "gpu_busy_share, memory_busy_share, gpu_power_w, sm_clock_mhz,"
                f" {COUNTERS}: lost",
            ),
            id="nothing",
        ),
    ],
)
def test_missing_figures_are_named_once(changes, missing):
    script = [gpu_of(uuid, **changes) for uuid in UUIDS]
    assert open_two(FakeGpuMonitor(script)).missing == missing


def test_variable_turns_the_reader_off():
    monitor = WatchedMonitor([gpu_of(uuid) for uuid in UUIDS])
    reader = open_two(monitor, **{GPU_ACTIVITY_VARIABLE: "0"})
    assert reader.missing == (f"{GPU_ACTIVITY_VARIABLE}=0 turns it off",)
    reader.start()
    reader.close()
    assert not monitor.read.is_set()
    assert reader.take() == {0: GpuActivity(), 1: GpuActivity()}


def test_only_the_first_rank_of_a_node_reports():
    reader = open_gpu_reader(two_ranks(rank=1), UUIDS, None, {})
    assert not reader.reports
    assert reader.take() == {}


class FailingMonitor(WatchedMonitor):
    """GPUs of which each sample is the result of ``fail``, once that is set."""

    fail = None

    def sample(self, uuid, figures=None):
        return super().sample(uuid, figures) if self.fail is None else self.fail()


def raise_error():
    raise RuntimeError("the bindings are broken")


def lose_gpu():
    return Unavailable(reason="the bindings are broken")


def failing_reader(monitor: FailingMonitor, fail) -> GpuReader:
    """Return a started reader of a GPU that fails after it was read once."""
    reader = GpuReader({0: UUIDS[0]}, monitor, read_every_s=0.001)
    assert reader.missing == ()
    monitor.fail = fail
    reader.start()
    return reader


@pytest.mark.parametrize("fail", [raise_error, lose_gpu])
def test_loss_of_a_gpu_is_reported_once(fail):
    failed = threading.Event()

    def fail_and_tell():
        failed.set()
        return fail()

    reader = failing_reader(FailingMonitor([gpu_of()]), fail_and_tell)
    assert failed.wait(WITHIN_S)
    reader.close()
    assert "the bindings are broken" in reader.take_loss()
    assert reader.take_loss() is None
    assert reader.take()[0].busy_share is None


def test_end_does_not_wait_for_a_hung_driver():
    hung, released = threading.Event(), threading.Event()

    def hang():
        hung.set()
        released.wait(WITHIN_S)
        return SAMPLE

    monitor = FailingMonitor([gpu_of()])
    reader = failing_reader(monitor, hang)
    assert hung.wait(WITHIN_S)
    reader.close()
    # The driver must not be shut down during a call.
    assert not released.is_set() and not monitor.is_closed
    released.set()


def test_end_releases_the_driver():
    monitor = WatchedMonitor([gpu_of()])
    reader = GpuReader({0: UUIDS[0]}, monitor)
    reader.start()
    reader.close()
    assert monitor.is_closed
    assert not [
        thread for thread in threading.enumerate() if thread.name == "gpu-activity"
    ]
