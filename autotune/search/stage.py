"""The search phase of a tuning, of any subject.

It searches a step's settings jointly, probes the best, and writes them into the
profile.
"""

from dataclasses import replace

from autotune.base.files import write_atomically
from autotune.errors import ExceedsMemory, OutOfTime
from autotune.evidence.explore import ExploreEvidence
from autotune.evidence.profile import Profile
from autotune.profiles.decide.micro_batch import with_headroom
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.toml_file import profile_to_toml
from autotune.search.decide.configuration_space import at_trained_size, with_size
from autotune.search.explore_evidence import explore_evidence
from autotune.search.measure import Exploration
from autotune.search.step import SearchedStep
from autotune.search.verification import ConfirmedChoice, confirm, confirm_one_of

EXPECTED_TRIALS = 40
"""Usual number of windows of a search, for the progress display."""
FOUND = "found by the joint search of the step's settings"
"""Reason for a size that a search chose."""


def explore(step: SearchedStep) -> ExploreEvidence:
    """Search the settings of a step, and write the result into its profile.

    Settings that are verified to be faster are probed and adopted.

    Raises:
        ProfileRejected: If the profile is of another machine, subject or dataset.
        Undecided: If the starting configuration could not be measured.
    """
    stored = step.stored
    require_local_probe(stored, step.bench.fingerprint)
    request = step.request()
    with step.bench.phase(
        "explore", stored.path, step.sweep, EXPECTED_TRIALS
    ) as runner:
        search = Exploration(request=request, runner=runner)
        search.run()
        choice = confirm(search)
    profile, choice = _settle(step, search, choice)
    evidence = explore_evidence(search, choice)
    write_atomically(
        stored.path,
        profile_to_toml(add_evidence(profile, "explore", evidence, runner)),
    )
    return evidence


def _settle(
    step: SearchedStep, search: Exploration, choice: ConfirmedChoice
) -> tuple[Profile, ConfirmedChoice]:
    """Probe the settings to adopt.

    If only a smaller micro-batch leaves the headroom free, its speed is verified as
    well.

    Returns:
        The profile with the adopted settings, and the choice; the stored profile, if
        nothing is adopted.
    """
    stored = step.stored.profile
    if not choice.adopted:
        return stored, choice
    try:
        probed = step.probed(choice.candidate, search.runner.budget_ends_s)
    except (ExceedsMemory, OutOfTime) as error:
        return stored, replace(choice, adopted=False, rejected=error.message)
    probe = probed.evidence.probe
    assert probe is not None
    most = with_headroom(probe.feasible_max, probed.constraints.headroom_share)
    choice = _with_headroom(search, choice, most)
    if not choice.adopted:
        return stored, choice
    size_name = search.request.settings.size.name
    evidence = probed.evidence.model_copy(
        update={"probe": probe.model_copy(update={"choice": FOUND})}
    )
    adopted = probed.with_size(int(choice.candidate[size_name]))
    return adopted.model_copy(update={"evidence": evidence}), choice


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
