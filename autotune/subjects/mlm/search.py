"""The settings of the bundled trainer's step, to be searched, and their predictions."""

import math
from dataclasses import dataclass, replace

from autotune.evidence.profile import Profile
from autotune.memory.estimate import CannotTrace
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.profiles.decide.micro_batch import with_headroom
from autotune.profiles.store import StoredProfile, before_sweep
from autotune.search.configuration import Configuration
from autotune.search.decide.configuration_space import (
    configuration_space,
    without_size,
)
from autotune.search.request import ExploreRequest, StepPrediction, StepPredictor
from autotune.search.windows import StepWindows
from autotune.speed.decide import predict_steps_s
from autotune.speed.measure import known_rates
from autotune.speed.values import MachineRates
from autotune.subjects.bench import SubjectBench
from autotune.subjects.mlm.memory.probe import MlmProbe, MlmProbeRequest
from autotune.subjects.mlm.settings import (
    MlmSettings,
    dataset_layouts,
    settings_to_search,
    step_support,
)
from autotune.subjects.mlm.workers.windows import training_windows
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_machine import Machine


def explore_request(
    bench: SubjectBench,
    stored: StoredProfile,
    probe_request: MlmProbeRequest,
    request: SweepRequest,
) -> ExploreRequest:
    """Return the search space around a profile's settings, with its windows.

    It is the part of ``autotune.search.step`` that knows the trainer's settings.

    Args:
        bench: Machine on which trials of the model run.
        stored: Profile that was probed here.
        probe_request: The probe. Settings that you fixed in it are not searched.
        request: Length of the windows, and their time budget.
    """
    train = before_sweep(stored.profile)
    probe = probe_request.settled(bench)
    searched, left_out = settings_to_search(
        train, probe_request.config, step_support(bench.site)
    )
    (layouts,) = (setting.values for setting in searched if setting.name == "layout")
    settings = MlmSettings(
        config=train,
        settings=searched,
        layouts=dataset_layouts(
            train,
            [str(layout) for layout in layouts],
            request.data,
            stored.profile.global_batch_tokens,
        ),
        ranks=probe.local_ranks,
        left_out=left_out,
    )
    configurations = configuration_space(
        settings, settings.starting, probe_request.max_size
    )
    predictor = None
    if probe.overheads is not None:
        predictor = _predictor(bench, stored.profile, probe, settings, configurations)
    return ExploreRequest(
        settings=settings,
        configurations=configurations,
        windows=StepWindows(
            settings=settings,
            windows=training_windows(
                bench, settings.window_config, request, probe.local_ranks
            ),
        ),
        budget_s=request.budget_s,
        trial_timeout_s=request.trial_timeout_s,
        predictor=predictor,
        study_name=f"{stored.path.stem}: explore",
        study_file=request.study_file,
    )


def _predictor(
    bench: SubjectBench,
    profile: Profile,
    probe: MlmProbe,
    settings: MlmSettings,
    configurations: tuple[Configuration, ...],
) -> StepPredictor:
    """Return predictions of the trainer's step, by traces on this machine."""
    cpu_name = bench.site.host.cpu_model or "cpu"
    rates = known_rates(cpu_name if bench.site.gpu is None else bench.site.gpu.name)
    headroom_share = profile.constraints.headroom_share
    predictions = _TracedSteps(
        machine=bench.machine,
        probe=probe,
        settings=settings,
        configurations=configurations,
        headroom_share=headroom_share,
        rates=rates,
    )
    defined_by: dict[str, object] = {
        "config": settings.window_config.model_dump(mode="json"),
        "memory_budget_bytes": probe.memory_budget_bytes,
        "headroom_share": headroom_share,
        "ranks": probe.local_ranks,
        "micro_batches": probe.micro_batches,
    }
    if rates is not None:
        defined_by["rates"] = rates.source
    return StepPredictor(predict=predictions.predict, defined_by=defined_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TracedSteps:
    """Predictions of the trainer's step, by traces."""

    machine: Machine
    probe: MlmProbe
    settings: MlmSettings
    configurations: tuple[Configuration, ...]
    """All configurations, whose sizes are predicted."""
    headroom_share: float
    rates: MachineRates | None
    """Constants of the machine; None if they are not known."""

    def predict(self, kind: Configuration) -> StepPrediction:
        """Predict the largest micro-batch, and seconds of steps by size.

        The micro-batch leaves the headroom free.
        """
        layout = self.settings.layout(kind)
        config = self.probe.config.model_copy(update=dict(kind))
        ranks = self.probe.local_ranks
        sequences_per_rank = layout.global_batch_size / ranks
        # No larger micro-batch is useful.
        useful_size = math.ceil(sequences_per_rank / (1 - self.headroom_share)) + 1
        request = self.probe.request
        most = min(useful_size, request.max_size)
        probe = replace(
            self.probe,
            request=replace(request, max_size=most),
            sequence_stats=layout.statistics,
            config=config,
        )
        try:
            estimate = probe.trace(self.machine)
        except CannotTrace:
            return StepPrediction(largest_size=None)
        largest_size = with_headroom(estimate.max_micro_batch_size, self.headroom_share)
        if self.rates is None or config.precision not in self.rates.matmul:
            return StepPrediction(largest_size=largest_size)
        size_name = self.settings.size.name
        sizes = [
            int(configuration[size_name])
            for configuration in self.configurations
            if without_size(self.settings, configuration) == kind
            and int(configuration[size_name]) <= largest_size
        ]
        # The trace computes all positions.
        micro_batches = [
            layout.computed_share
            * split_global_batch(
                layout.global_batch_size, size, ranks
            ).gradient_accumulation_steps
            for size in sizes
        ]
        seconds = predict_steps_s(
            estimate.works, self.rates, config, sizes, micro_batches
        )
        return StepPrediction(
            largest_size=largest_size,
            step_s_by_size=dict(zip(sizes, seconds, strict=True)),
        )
