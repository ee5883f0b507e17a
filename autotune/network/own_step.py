"""A step of yours on one rank and on all: what synchronisation costs, from outside."""

import statistics

from autotune.base.window_statistics import paired_ratio
from autotune.errors import NotCheckable, ProfileRejected
from autotune.evidence.network import (
    GradientBytesFrom,
    Link,
    Network,
    NetworkEvidence,
    StepOnRanks,
)
from autotune.evidence.profile import Profile
from autotune.memory.size_probe import StepCounts, step_fields
from autotune.memory.values import StepRequest
from autotune.network.decide.link_fit import link_warnings
from autotune.network.decide.own_scaling import ASSUMPTIONS, OwnScaling, predict_nodes
from autotune.network.decide.step_model import FP32_BYTES, all_reduce_s
from autotune.network.link_measurement import MeasuredLinks
from autotune.profiles.store import StoredProfile
from autotune.subjects.baseline import LOADER_SETTINGS
from autotune.subjects.bench import SubjectBench
from autotune.subjects.decide import window_failure
from autotune.trials.job_figures import StepFigures
from autotune.trials.outcomes import Measured, Outcome
from autotune.trials.rounds import Rounds
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.values import Trial

ROUNDS = 3
"""Rounds of a trial on one rank and one on all of them."""
STEPS = StepCounts(warmup=3, timed=8)
"""Optimizer steps of each trial."""


def measure_on_ranks(
    bench: SubjectBench,
    stored: StoredProfile,
    request: SweepRequest,
    ranks: int,
    runner: TrialRunner,
) -> tuple[StepOnRanks, int]:
    """Time the step on one rank and on all ranks, interleaved.

    Args:
        bench: Bench that has imported your code.
        stored: The profile, with the size.
        request: Time limits.
        ranks: Number of all ranks, on this node.
        runner: Runner of the trials.

    Returns:
        The figures, and the number of trials.

    Raises:
        NotCheckable: If the profile has no size.
        BadInput: If your code fails.
        Undecided: If a trial fails for another reason.
    """
    rounds = Rounds(runner=runner)
    figures: dict[int, list[StepFigures]] = {1: [], ranks: []}
    functions = tuple(bench.subject.code().values())

    def check(count: int, outcome: Outcome, seconds: float) -> None:
        label = runner.finished[-1].label
        failure = window_failure(functions, label, outcome)
        if failure is not None:
            raise failure
        runner.require_measured(f"the step on {count} ranks", outcome)

    for number in range(ROUNDS):
        trials = {
            count: (
                _trial(bench, stored, request, count, number, most_ranks=ranks),
                f"{count} rank{'s' * (count > 1)}, round {number + 1}",
            )
            for count in figures
        }
        for count, outcome in rounds.measure_round(number, trials, check).items():
            assert isinstance(outcome, Measured)
            figures[count].append(StepFigures.of(outcome))
    return _on_ranks(stored.profile, figures[1], figures[ranks]), rounds.windows


def _trial(
    bench: SubjectBench,
    stored: StoredProfile,
    request: SweepRequest,
    ranks: int,
    round_number: int,
    *,
    most_ranks: int,
) -> Trial:
    """Return the trial of a round on a number of ranks.

    On a CPU, one rank has only the threads that it has beside all others.
    """
    threads = None
    if bench.site.device == "cpu":
        threads = max(1, bench.site.host.allotted_cpus // most_ranks)
    size = _size(stored.profile)
    choice = {
        name: value
        for name, value in stored.profile.settings.items()
        if name not in LOADER_SETTINGS
    }
    step = StepRequest(
        **step_fields(
            bench.subject,
            {**choice, bench.subject.size.name: size},
            STEPS,
            device=bench.site.device,
            local_ranks=ranks,
            source_sha256=bench.source_sha256("step"),
        ),
        memory_budget_bytes=None,
        attempt=round_number,
        threads=threads,
    )
    timeout_s = request.trial_timeout_s
    return step.trial(
        timeout_s=timeout_s,
        limit_s=timeout_s,
        directory=bench.import_directory,
        device_used_before_bytes=bench.used_before_bytes(ranks),
    )


def _size(profile: Profile) -> int:
    """Return the size of a profile.

    Raises:
        NotCheckable: If it has none, or its size is no number.
    """
    size = profile.size
    if isinstance(size, bool) or not isinstance(size, int):
        raise NotCheckable(
            f"the profile has no {profile.subject.size} with which to time the step",
            next_step="Probe first: autotune probe --step MODULE:FUNCTION",
        )
    return size


def _on_ranks(
    profile: Profile, one: list[StepFigures], several: list[StepFigures]
) -> StepOnRanks:
    """Return the figures of all rounds."""
    one_s = [statistics.median(figures.step_s) for figures in one]
    several_s = [statistics.median(figures.step_s) for figures in several]
    efficiency = paired_ratio(list(zip(one_s, several_s, strict=True)))
    gradient_bytes, source = _gradient_bytes(profile, one)
    return StepOnRanks(
        size=_size(profile),
        unit=profile.subject.unit,
        units_per_step=one[0].units_per_step,
        one_rank_step_s=one_s,
        all_ranks_step_s=several_s,
        added_s=statistics.median(several_s) - statistics.median(one_s),
        efficiency=efficiency.value,
        efficiency_low=efficiency.low,
        efficiency_high=efficiency.high,
        gradient_bytes=gradient_bytes,
        gradient_bytes_from=source,
    )


def _gradient_bytes(
    profile: Profile, steps: list[StepFigures]
) -> tuple[int | None, GradientBytesFrom]:
    """Return the size of all gradients, and its origin."""
    held_bytes = max(figures.gradient_bytes for figures in steps)
    if held_bytes > 0:
        return held_bytes, "optimizers"
    if profile.parameters is not None:
        return FP32_BYTES * profile.parameters, "parameters"
    return None, "not known"


def own_evidence(
    links: MeasuredLinks, measured: tuple[StepOnRanks, int], runner: TrialRunner
) -> NetworkEvidence:
    """Return the evidence of links, and of a step on one rank and on all.

    Args:
        links: The measured links.
        measured: What ``measure_on_ranks`` returned.
        runner: Runner of the step's trials.
    """
    steps, trials = measured
    if steps.gradient_bytes is not None:
        steps = steps.model_copy(
            update={"all_reduce_s": all_reduce_s(steps.gradient_bytes, links.network)}
        )
    figures = links.figures
    return NetworkEvidence(
        nodes=figures.nodes,
        ranks_per_node=figures.ranks_per_node,
        backend=figures.backend,
        interface=figures.interface,
        interface_bytes_per_s=figures.interface_bytes_per_s,
        transport=figures.transport,
        links=list(links.fits.values()),
        all_reduce_factor=links.all_reduce_factor,
        warnings=[*link_warnings(figures, None), *_warnings(steps)],
        matmul_flops_per_s=list(figures.matmul_flops_per_s),
        on_ranks=steps,
        choice="your own: code of yours synchronises its gradients itself",
        windows=1 + trials,
        seconds=round(runner.seconds, 3),
    )


def _warnings(steps: StepOnRanks) -> list[str]:
    """Return warnings about an implausible efficiency."""
    low = steps.efficiency_low
    if low is None or low <= 1.0:
        return []
    return [
        "the step is faster on all ranks than on one, which other programs, or a step"
        " that splits its size among ranks, may explain: measure again on an idle"
        " machine"
    ]


def predict_own(
    stored: StoredProfile,
    counts: list[int],
    assumed: Link | None,
    ranks_per_node: int | None,
    assumed_words: str,
) -> OwnScaling:
    """Return the predicted step of your code on each number of nodes.

    Args:
        stored: The profile, with a network measurement.
        counts: Numbers of nodes.
        assumed: Assumed link between nodes; None if it was measured.
        ranks_per_node: Ranks on each node; None as measured.
        assumed_words: The assumed link in words.

    Raises:
        ProfileRejected: If the step was not measured on ranks.
        NotCheckable: If the size of the gradients, or the link between nodes, is not
            known.
    """
    network = stored.profile.evidence.network
    if network is None or network.on_ranks is None:
        raise ProfileRejected(
            f"{stored.path} has no step on one rank and on several",
            next_step=f"Measure it: autotune network {stored.path} --ranks 2",
        )
    steps = network.on_ranks
    if steps.gradient_bytes is None:
        raise NotCheckable(
            "the size of the gradients is not known, so no scaling can be predicted",
            next_step=(
                "Update the weights with an optimizer of torch; or add build_model to"
                " the module of your step, and probe again"
            ),
        )
    links = {link.scope: link.link for link in network.links}
    between = assumed or links.get("between nodes")
    if between is None:
        raise NotCheckable(
            "the link between nodes is not known",
            next_step=(
                f"Assume a NIC: autotune network {stored.path} --predict --bandwidth"
                " 25Gbit"
            ),
        )
    rows = predict_nodes(
        statistics.median(steps.one_rank_step_s),
        steps.gradient_bytes,
        steps.units_per_step,
        Network(
            nodes=1,
            ranks_per_node=ranks_per_node or network.ranks_per_node,
            between=between,
            within=links.get("within nodes"),
            trees=network.backend.startswith("nccl"),
        ),
        counts,
    )
    return OwnScaling(
        name=stored.profile.subject.name,
        unit=steps.unit,
        rows=rows,
        sources=(
            f"step: measured on one rank with {stored.profile.subject.size}"
            f" {steps.size}",
            f"gradients: {steps.gradient_bytes:,} bytes, from"
            f" {steps.gradient_bytes_from}",
            f"links between nodes: {assumed_words}",
            *ASSUMPTIONS,
        ),
    )
