"""Inputs of ``autotune plan`` for training code of yours.

Its probe and its sweep tell rates and memory; your code is not traced.
"""

from dataclasses import replace

from autotune.base.wording import plural
from autotune.errors import UsageError
from autotune.evidence.network import Network, RankCompute
from autotune.evidence.peak_contents import ContentKind
from autotune.evidence.plan import Basis, Fleet, PlanFigure, derived
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.launch.training_job import default_ranks
from autotune.machine.gpu_models import find_gpu_model
from autotune.network.decide.scaling_model import (
    AllRanks,
    Load,
    ScalingModel,
    gradient_syncs,
    spread,
)
from autotune.network.gradient_parts import even_gradient_parts
from autotune.network.scaling import (
    ASSUMED_LINE_SHARE,
    Assumed,
    joins_nodes,
    links_of,
)
from autotune.plan.decide import Plan, plan_of
from autotune.plan.request import LINE_BITS_PER_S, PlanRequest
from autotune.profiles.decide.follow_up import (
    command,
    probe_command,
    workers_command,
)
from autotune.profiles.decide.rates import tuned_rate
from autotune.profiles.store import StoredProfile

ACCUMULATION = "gradient_accumulation_steps"
"""Setting of micro-batches in an optimizer step, as libraries call it."""
_ELEMENT_BYTES = 4
"""Bytes of a gradient's element, assumed to be fp32."""


def plan_of_code(asked: PlanRequest, stored: StoredProfile) -> Plan:
    """Plan a training with code of yours.

    Raises:
        UsageError: If the length is missing, or an option needs another profile.
        BadInput: If the goal cannot be converted to units.
    """
    profile = stored.profile
    subject, probe = profile.subject, profile.evidence.probe
    unit = subject.unit
    if asked.goal is None:
        raise UsageError(
            "the length of the training is missing",
            next_step=(
                f"Add one of --units 10M ({unit}), --steps 100000, --duration 24h."
            ),
        )
    _reject_options(asked, profile)
    size = profile.size
    if not isinstance(size, int):
        raise UsageError(
            f"the profile sets no {subject.size}, which a plan requires",
            next_step=f"Probe first: {probe_command(profile, stored.path)}",
        )
    fleet = _fleet(asked, profile)
    per_size = PlanFigure(
        value=subject.units_per_size, basis="given", source="the profile's subject"
    )
    global_batch_size, batch_words = _global_batch(asked, profile, size, fleet)
    known = Plan(
        model=subject.words,
        unit=unit,
        of_code=True,
        noun=subject.noun or "sample",
        goal=asked.goal,
        fleet=fleet,
        units_per_size=replace(per_size, source=batch_words),
        units_per_pass=None,
        global_batch_size=global_batch_size,
        price_per_device_hour=asked.price_per_device_hour,
        rank_bytes=_rank_bytes(probe, profile, size),
        counted_parameters=_parameters(probe),
        memory_missing="the profile has no probe",
        next_command=_next(stored, fleet),
    )
    return plan_of(_with_rates(known, asked, profile, size))


def _reject_options(asked: PlanRequest, profile: Profile) -> None:
    """Raise if an option needs the bundled trainer, or another machine's figures."""
    words = profile.subject.words
    if asked.data is not None or asked.vocab_size is not None:
        raise UsageError(
            f"--data and --vocab-size cannot be used with {words}, which has its own"
            " data",
            next_step="Remove them, and give the length by --units or --steps.",
        )
    there = profile.fingerprint
    if asked.gpu is not None and find_gpu_model(asked.gpu).name != there.gpu_name:
        measured_on = there.gpu_name or there.cpu_model or "a CPU"
        raise UsageError(
            f"--gpu {asked.gpu} cannot be planned: {words} was measured on"
            f" {measured_on}, and is not traced",
            next_step="Probe it on that GPU, and plan from that profile.",
        )
    if there.device == "cpu" and asked.price_per_device_hour is not None:
        raise UsageError(
            f"--price-per-gpu-hour cannot be used: {there.cpu_model or 'a CPU'} has no"
            " GPU",
            next_step="Remove it, or probe on a GPU.",
        )


def _fleet(asked: PlanRequest, profile: Profile) -> Fleet:
    there, ranks = profile.fingerprint, default_ranks(profile)
    on_cpu = there.device == "cpu"
    return Fleet(
        device=there.device,
        name=there.gpu_name or (there.cpu_model or "a CPU" if on_cpu else "a GPU"),
        nodes=asked.nodes,
        ranks_per_node=asked.ranks_per_node or ranks,
        cpus_per_rank=there.allotted_cpus / ranks if on_cpu else None,
        memory_bytes=profile.constraints.memory_budget_bytes or 0,
    )


def _global_batch(
    asked: PlanRequest, profile: Profile, size: int, fleet: Fleet
) -> tuple[int, str]:
    """Return the sizes of an optimizer step of all ranks, and how they come about."""
    subject = profile.subject
    if asked.global_batch_tokens is not None:
        if subject.unit != "tokens":
            raise UsageError(
                f"--global-batch-tokens cannot be used with {subject.unit}",
                next_step=f"Set {ACCUMULATION} in your code, or use another --nodes.",
            )
        sizes = round(asked.global_batch_tokens / subject.units_per_size)
        return max(fleet.ranks, sizes), "--global-batch-tokens"
    declared = {**subject.arguments, **profile.settings}.get(ACCUMULATION)
    micro_batches = declared if isinstance(declared, int) and declared > 0 else 1
    told = "accumulation as declared" if declared else "no accumulation is declared"
    words = (
        f"{subject.size}={size} x {plural(micro_batches, 'micro-batch')}"
        f" x {plural(fleet.ranks, 'rank')}; {told}"
    )
    return size * micro_batches * fleet.ranks, words


def _rank_bytes(
    probe: ProbeEvidence | None, profile: Profile, size: int
) -> PlanFigure | None:
    """Return the peak memory of a rank at a size, measured or between two sizes."""
    if probe is None:
        return None
    peaks = {
        row.size: row.peak_bytes for row in probe.sizes if row.peak_bytes is not None
    }
    peaks[probe.feasible_max] = probe.feasible_peak_bytes
    words = profile.subject.size_words
    if size in peaks:
        return PlanFigure(
            value=peaks[size], basis="measured", source=f"probe of {words(size)}"
        )
    below = max((other for other in peaks if other < size), default=None)
    above = min((other for other in peaks if other > size), default=None)
    if below is None or above is None:
        return None
    part = (size - below) / (above - below)
    return PlanFigure(
        value=peaks[below] + part * (peaks[above] - peaks[below]),
        basis="predicted",
        source=f"probes of {words(below)} and {words(above)}",
    )


def _parameters(probe: ProbeEvidence | None) -> PlanFigure | None:
    """Return the parameters that the probe's trace counted."""
    if probe is None or probe.parameters is None:
        return None
    return PlanFigure(
        value=probe.parameters, basis="measured", source="counted by the probe"
    )


def _with_rates(known: Plan, asked: PlanRequest, profile: Profile, size: int) -> Plan:
    """Return the plan with the rates of one rank and of all, or why it has none."""
    rate = _rank_rate(asked, profile)
    if rate is None:
        missing = "neither the probe nor the sweep has a rate for these settings"
        told = (
            f"No time and no cost: {missing}. Give the throughput of one rank with"
            " --units-per-s."
        )
        return replace(known, rate_missing=missing, warnings=(told,))
    known = replace(known, rank_units_per_s=rate)
    model = _scaling_model(known, asked, profile, size, rate)
    if model is None:
        return _with_perfect_scaling(known, rate)
    scaling, links = model
    return replace(
        known, all_ranks=spread(rate, scaling, nodes=known.fleet.nodes, links=links)
    )


def _rank_rate(asked: PlanRequest, profile: Profile) -> PlanFigure | None:
    if asked.units_per_s is not None:
        return PlanFigure(
            value=asked.units_per_s, basis="given", source="--units-per-s"
        )
    tuned = tuned_rate(profile)
    if tuned is None:
        return None
    source = f"{tuned.source}, {plural(tuned.ranks, 'rank')}"
    return PlanFigure.on(tuned.known, tuned.interval.scaled(1 / tuned.ranks), source)


def _with_perfect_scaling(known: Plan, rate: PlanFigure) -> Plan:
    """Return the plan as if nodes did not slow each other down."""
    ranks = known.fleet.ranks
    told = f"{plural(ranks, 'rank')} with perfect scaling"
    total = replace(
        derived(lambda one: one * ranks, rate, source=told), basis="assumed"
    )
    told = (
        f"Scaling to {known.fleet.nodes} nodes is not known: neither the network nor"
        " the number of parameters was measured. Times are those of perfect scaling,"
        " and so a lower bound. Add build_model to your module and probe again, or run"
        " autotune network."
    )
    return replace(
        known,
        all_ranks=AllRanks(units_per_s=total),
        warnings=(*known.warnings, told),
    )


def _scaling_model(
    known: Plan, asked: PlanRequest, profile: Profile, size: int, rate: PlanFigure
) -> tuple[ScalingModel, tuple[Basis, str]] | None:
    """Return the model of scaling, and the basis and source of its links.

    Returns:
        None for several nodes if the size of the gradients is unknown.
    """
    fleet = known.fleet
    elements = _gradient_elements(profile)
    if elements is None and fleet.nodes > 1:
        return None
    per_size = known.units_per_size.value
    compute = RankCompute(  # a rank with the given rate and no other costs
        sequence_s=per_size / rate.value,
        micro_batch_s=0.0,
        optimizer_step_s=0.0,
        gradients=even_gradient_parts(elements or 1),
    )
    load = Load(
        compute=compute,
        global_batch_size=known.global_batch_size,
        tokens_per_sequence=per_size,
        max_micro_batch_size=size,
    )
    network, links = _network(asked, profile, fleet)
    syncs = gradient_syncs(sixteen_bit=False)
    return ScalingModel(load=load, network=network, gradient_syncs=syncs), links


def _gradient_elements(profile: Profile) -> int | None:
    """Return the elements of all gradients: as many as parameters.

    The probe counts parameters in a trace, or their bytes in the contents of memory.
    """
    probe = profile.evidence.probe
    if probe is None:
        return None
    if probe.parameters is not None:
        return probe.parameters
    if probe.contents is None:
        return None
    parameter_bytes = sum(
        row.bytes_of(ContentKind.PARAMETERS) for row in probe.contents.rows
    )
    return parameter_bytes // _ELEMENT_BYTES or None


def _network(
    asked: PlanRequest, profile: Profile, fleet: Fleet
) -> tuple[Network, tuple[Basis, str]]:
    """Return measured links, or else assumed ones, with their basis and source."""
    assumed = asked.links
    if assumed is None and joins_nodes(profile.evidence.network):
        network, _, source = links_of(profile, None, fleet.ranks_per_node)
        return network, ("predicted", f"predicted: {source}")
    line = assumed or Assumed(bits_per_s=LINE_BITS_PER_S)
    network, _, _ = links_of(profile, line, fleet.ranks_per_node)
    told = (
        f"assumed NIC of {line.bits_per_s / 1e9:g} Gbit/s per node at"
        f" {100 * ASSUMED_LINE_SHARE:.0f} % of its rate; gradients are fp32 and become"
        " ready evenly in backward"
    )
    return network, ("assumed", told)


def _next(stored: StoredProfile, fleet: Fleet) -> str:
    """Return the command to run next: a missing measurement, or the values to use."""
    profile, path = stored.profile, stored.path
    if profile.evidence.probe is None:
        return probe_command(profile, path)
    if profile.evidence.workers is None:
        return workers_command(profile, path)
    if fleet.nodes > 1 and not joins_nodes(profile.evidence.network):
        return command("network", path, slurm=True)
    return command("profile show", path)
