"""Benches whose trials are computed, for tests of stages."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from autotune.core.hardware import SlurmFacts
from autotune.core.outcome import Measured, Outcome
from autotune.core.trial import Trial
from autotune.search.probe import ProbeRequest
from autotune.search.site import Site
from autotune.tuning.bench import Bench
from autotune.tuning.probe import asked_config
from tests.autotune.search.explorations import Rate, machine_of
from tests.autotune.search.test_probe import simulate as step_of_a_machine
from tests.fakes import FakeClock, FakeHost, FakeMachine
from trainer.config import ModelSettings

SETTINGS = ModelSettings(name="tiny", config={"model_type": "bert", "hidden_size": 64})
NO_JOB = SlurmFacts(job_id=None, end_time_s=None, nodes=None, tasks=None, gpus_per_node=None, commands=())


def bench_on(machine: FakeMachine, data: Path, **changes) -> Bench:
    """A CPU with eight cores."""
    site = Site(
        device="cpu", gpus=(), host=FakeHost().facts([data]), slurm=NO_JOB,
        versions={"torch": "2.13.0", "transformers": "5.0"}, gpu_absent="none",
    )  # fmt: skip
    server = SimpleNamespace(versions={"cuda": None}, waited_s=0.0)
    return Bench(site=replace(site, **changes), server=server, machine=machine, monitor=SimpleNamespace())


def machine_for(rate: Rate, clock: FakeClock, **options) -> FakeMachine:
    """Windows read what a rate says; steps take 300 MB and 20 MB for each row."""
    windows = machine_of(rate, clock, **options)

    def simulate(trial: Trial) -> Outcome:
        if trial.job == "feed":
            return windows.run(trial)
        clock.sleep(1.0)
        outcome = step_of_a_machine(trial)
        assert not isinstance(outcome, Measured) or outcome.figures
        return outcome

    return FakeMachine(simulate)


def probe_request(
    place: Path, data: Path, model: ModelSettings = SETTINGS, *, settings: dict[str, object] | None = None, **changes
) -> ProbeRequest:
    """A probe of the small model, without traces; ``settings`` are of its step."""
    step = {"seq_length_tokens": 64, "global_batch_tokens": 2048} | (settings or {})
    request = ProbeRequest(
        config=asked_config(model, **step), data=data, reports=place / "r", memory_bytes=10**9, max_rows=64,
        traced=False,
    )  # fmt: skip
    return replace(request, **changes)
