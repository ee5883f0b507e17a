"""The search phase of a tuning.

It searches a step's settings jointly, probes the best, and writes them into the
profile.
"""

import math
from dataclasses import dataclass, replace

from autotune.base.files import write_atomically
from autotune.errors import ExceedsMemory, OutOfTime
from autotune.evidence.explore import ExploreEvidence
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.memory.estimate import CannotTrace
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.profiles.decide.micro_batch import with_headroom
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import StoredProfile, before_sweep
from autotune.profiles.toml_file import profile_to_toml
from autotune.search.configuration import Configuration
from autotune.search.decide.configuration_space import (
    at_trained_size,
    configuration_space,
    with_size,
    without_size,
)
from autotune.search.explore_evidence import explore_evidence
from autotune.search.measure import Exploration
from autotune.search.request import ExploreRequest, StepPrediction, StepPredictor
from autotune.search.verification import ConfirmedChoice, confirm, confirm_one_of
from autotune.search.windows import StepWindows
from autotune.speed.decide import predict_steps_s
from autotune.speed.measure import known_rates
from autotune.speed.values import MachineRates
from autotune.subjects.mlm.memory.probe import Probe, ProbeRequest
from autotune.subjects.mlm.memory.stage import prepare, profile_of_probe, settled_probe
from autotune.subjects.mlm.settings import (
    MlmSettings,
    dataset_layouts,
    settings_to_search,
    step_support,
)
from autotune.subjects.mlm.workers.windows import training_windows
from autotune.trials.session import Session
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_machine import Machine


def explore_settings(
    bench: Session,
    stored: StoredProfile,
    probe_request: ProbeRequest,
    request: SweepRequest,
) -> ExploreEvidence:
    """Search the settings of a step, and write the result.

    Settings that are verified to be faster are probed and adopted. Settings that you
    fixed in the ``probe_request`` are not searched.

    Raises:
        ProfileRejected: If the profile does not match the machine, model or dataset.
        Undecided: If the starting configuration could not be measured.
    """
    require_local_probe(stored, bench.fingerprint(stored.profile.train.model))
    space = explore_request(bench, stored, probe_request, request)
    with bench.phase(
        "explore", stored.path, stored.profile.train.model, request, 40
    ) as runner:
        search = Exploration(request=space, runner=runner)
        search.run()
        choice = confirm(search)
    profile, choice = _settle(bench, stored, probe_request, search, choice)
    evidence = explore_evidence(search, choice)
    write_atomically(
        stored.path,
        profile_to_toml(add_evidence(profile, "explore", evidence, runner)),
    )
    return evidence


def _settle(
    bench: Session,
    stored: StoredProfile,
    probe_request: ProbeRequest,
    search: Exploration,
    choice: ConfirmedChoice,
) -> tuple[Profile, ConfirmedChoice]:
    """Probe the settings to adopt.

    If only a smaller micro-batch leaves the headroom free, its speed is verified as
    well.

    Returns:
        The profile with the adopted settings, and the choice; the stored profile, if
        nothing is adopted.
    """
    if not choice.adopted:
        return stored.profile, choice
    try:
        probed = _probe(bench, stored, probe_request, search, choice.candidate)
    except (ExceedsMemory, OutOfTime) as error:
        return stored.profile, replace(choice, adopted=False, rejected=error.message)
    probe = probed.evidence.probe
    assert probe is not None
    choice = _with_headroom(
        search,
        choice,
        with_headroom(probe.feasible_max, probed.constraints.headroom_share),
    )
    if not choice.adopted:
        return stored.profile, choice
    return _adopted(probed, probe, search, choice.candidate), choice


def _probe(
    bench: Session,
    stored: StoredProfile,
    probe_request: ProbeRequest,
    search: Exploration,
    candidate: Configuration,
) -> Profile:
    """Return the profile of a probe of the candidate's settings.

    Raises:
        ExceedsMemory: If not even size 1 fits.
        OutOfTime: If the time budget is used up.
    """
    settings = {
        **candidate,
        "parallel": stored.profile.train.parallel,
        "global_batch_tokens": stored.profile.constraints.global_batch_tokens,
    }
    request = replace(
        probe_request, config=probe_request.config.model_copy(update=settings)
    )
    profile, _ = profile_of_probe(
        bench,
        prepare(bench, request),
        stored.path,
        budget_ends_s=search.runner.budget_ends_s,
        study_name=f"{stored.path.stem}: probe of the explored settings",
    )
    return profile


def _with_headroom(
    search: Exploration, choice: ConfirmedChoice, most: int
) -> ConfirmedChoice:
    """Return the choice with a size that leaves the headroom free.

    A smaller size than the candidate's is verified to be faster as well.

    Args:
        search: Search that has ended.
        choice: Its choice.
        most: Largest size that leaves the headroom free.
    """
    settings = search.request.settings
    if int(choice.candidate[settings.size.name]) <= most:
        return choice
    smaller = at_trained_size(settings, with_size(settings, choice.candidate, most))
    if smaller == search.starting:
        reason = (
            f"only micro-batch size {most} leaves the headroom free, which is the"
            " starting configuration"
        )
        return replace(choice, adopted=False, rejected=reason)
    search.state.add(smaller)
    verified = confirm_one_of([smaller], search)
    return replace(
        verified,
        equal_loss=verified.equal_loss or choice.equal_loss,
        passed_over=choice.passed_over,
    )


def _adopted(
    probed: Profile, probe: ProbeEvidence, search: Exploration, candidate: Configuration
) -> Profile:
    """Return the profile of a probe with the size that the search chose."""
    size = int(candidate[search.request.settings.size.name])
    train = probed.train.model_copy(update={"micro_batch_size": size})
    reason = "found by the joint search of the step's settings"
    evidence = probed.evidence.model_copy(
        update={"probe": probe.model_copy(update={"choice": reason})}
    )
    return probed.with_train(train).model_copy(update={"evidence": evidence})


def explore_request(
    bench: Session,
    stored: StoredProfile,
    probe_request: ProbeRequest,
    request: SweepRequest,
) -> ExploreRequest:
    """Return the search space around a profile's settings, with its windows.

    Arguments are as for ``explore_settings``.
    """
    train = before_sweep(stored.profile)
    probe = settled_probe(bench, probe_request)
    searched, left_out = settings_to_search(
        train, probe_request.config, step_support(bench.site)
    )
    (layouts,) = (one.values for one in searched if one.name == "layout")
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
        settings, settings.starting, probe_request.max_micro_batch_size
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
    bench: Session,
    profile: Profile,
    probe: Probe,
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
    probe: Probe
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
        most = min(useful_size, request.max_micro_batch_size)
        probe = replace(
            self.probe,
            request=replace(request, max_micro_batch_size=most),
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
