"""Benches whose trials are computed, for tests of phases."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from autotune.subjects.bench import SubjectBench
from autotune.subjects.mlm.memory.probe import MlmProbeRequest
from autotune.subjects.mlm.memory.probe_requests import requested_config
from autotune.subjects.mlm.subject import MlmSubject
from autotune.trials.outcomes import Outcome
from autotune.trials.values import Trial
from testbed.examples.feeds import ON_CPU
from testbed.fakes import FakeClock, FakeHost, FakeMachine
from testbed.simulators.explorations import Rate, machine_of
from tests.autotune.memory.simulated_probes import simulate as simulate_probe_trial
from trainer.formats.manifest import read_manifest
from trainer.formats.train_config import ModelSettings

SETTINGS = ModelSettings(name="tiny", config={"model_type": "bert", "hidden_size": 64})


def bench_on(machine: FakeMachine, data: Path, **changes) -> SubjectBench:
    site = replace(ON_CPU, host=FakeHost().facts([data]), **changes)
    server = SimpleNamespace(versions={"cuda": None}, waited_s=0.0, environment={})
    config = requested_config(SETTINGS)
    return SubjectBench(
        site=site,
        subject=MlmSubject.of_dataset(config, read_manifest(data)),
        server=server,
        machine=machine,
    )


def machine_for(rate: Rate, clock: FakeClock, **options) -> FakeMachine:
    """Return a machine whose windows follow a rate.

    Its steps take 300 MB, and 20 MB for each sequence.
    """
    windows = machine_of(rate, clock, **options)

    def simulate(trial: Trial) -> Outcome:
        if trial.job == "window":
            return windows.run(trial)
        clock.sleep(1.0)
        return simulate_probe_trial(trial)

    return FakeMachine(simulate)


def probe_request(
    place: Path,
    data: Path,
    model: ModelSettings = SETTINGS,
    *,
    settings: dict[str, object] | None = None,
    **changes,
) -> MlmProbeRequest:
    """A probe of the small model, without traces; ``settings`` are of its step."""
    step = {"seq_length_tokens": 64, "global_batch_tokens": 2048} | (settings or {})
    request = MlmProbeRequest(
        config=requested_config(model, **step),
        data=data,
        reports=place / "r",
        memory_bytes=10**9,
        max_size=64,
        traced=False,
    )
    return replace(request, **changes)
