"""A report from its inputs: all sections in their order."""

from autotune.show.report.answer import answer, at_a_glance
from autotune.show.report.before import before_after, cost
from autotune.show.report.document import Block, Document, Section
from autotune.show.report.explored import explored
from autotune.show.report.figures import listed
from autotune.show.report.fit import curve, memory
from autotune.show.report.inputs import ReportedProfile, ReportedRun, named, part_of_each
from autotune.show.report.lengths import lengths_of_each
from autotune.show.report.loading import loading
from autotune.show.report.network import network
from autotune.show.report.origin import machine, reproduce, sign_off
from autotune.show.report.recommendations import recipe, recommendations
from autotune.show.report.runs import runs
from autotune.show.report.steps import runs_only, steps
from autotune.show.report.trials import trials_of_each


def report_document(profiles: tuple[ReportedProfile, ...], reported: tuple[ReportedRun, ...]) -> Document:
    """The whole report; what is missing says so, with the command that would measure it.

    Raises:
        ValueError: If there is no profile.
    """
    if not profiles:
        raise ValueError("a report needs a profile")
    profiles, reported = named(profiles, reported)
    measured, later = _measured(profiles, reported), _later(profiles, reported)
    advice = recommendations(profiles, reported, (*measured, *later))
    sections = (*measured, _section("Recommendations", "advice", advice), *later)
    names = listed(list(dict.fromkeys(one.name for one in profiles)), "models")
    return Document(title=f"Tuning report: {names}", subtitle=_subtitle(profiles), sections=sections)


def _measured(profiles: tuple[ReportedProfile, ...], reported: tuple[ReportedRun, ...]) -> tuple[Section, ...]:
    parts: tuple[tuple[str, str, tuple[Block, ...]], ...] = (
        ("The answer", "answer", _answers(profiles, reported)),
        ("Before and after", "before", part_of_each(profiles, "before", before_after)),
        ("What the tuning cost", "cost", part_of_each(profiles, "cost", cost)),
        ("Memory", "memory", part_of_each(profiles, "memory", memory)),
        ("Throughput by micro-batch", "curve", part_of_each(profiles, "curve", curve)),
        ("Settings searched together", "explored", part_of_each(profiles, "explored", explored)),
        ("Loader workers", "workers", part_of_each(profiles, "workers", loading)),
        ("Scaling and network", "network", part_of_each(profiles, "network", network)),
        ("Where a step's time goes", "steps", _steps(profiles, reported)),
        ("Lengths and packing", "lengths", lengths_of_each(profiles, reported)),
    )
    return tuple(_section(*part) for part in parts)


def _later(profiles: tuple[ReportedProfile, ...], reported: tuple[ReportedRun, ...]) -> tuple[Section, ...]:
    parts: tuple[tuple[str, str, tuple[Block, ...]], ...] = (
        ("Changes of the recipe", "recipe", recipe(profiles, reported)),
        ("Training runs: expected and achieved", "runs", runs(profiles, reported)),
        ("Every trial", "trials", trials_of_each(profiles)),
        ("The machine", "machine", machine(profiles)),
        ("How to reproduce it", "reproduce", part_of_each(profiles, "reproduce", reproduce)),
        ("Sign-off", "sign-off", part_of_each(profiles, "sign-off", sign_off)),
    )
    return tuple(_section(*part) for part in parts)


def _steps(profiles: tuple[ReportedProfile, ...], reported: tuple[ReportedRun, ...]) -> tuple[Block, ...]:
    known = {one.path for one in profiles}
    others = tuple(run for run in reported if run.profile_path not in known)
    return (*part_of_each(profiles, "steps", lambda one: steps(one, reported)), *runs_only(others))


def _answers(profiles: tuple[ReportedProfile, ...], reported: tuple[ReportedRun, ...]) -> tuple[Block, ...]:
    """Side by side where there are several, and then each in words."""
    several = (at_a_glance(profiles, reported),) if len(profiles) > 1 else ()
    return (*several, *part_of_each(profiles, "answer", lambda one: answer(one, reported)))


def _section(title: str, key: str, blocks: tuple[Block, ...]) -> Section:
    return Section(title=title, key=key, blocks=blocks)


def _subtitle(profiles: tuple[ReportedProfile, ...]) -> str:
    first = profiles[0].profile
    place = first.fingerprint.gpu_name or first.fingerprint.cpu_model or first.fingerprint.device
    several = f"{first.fingerprint.gpu_count} GPUs: " if first.fingerprint.gpu_count > 1 else ""
    pretended = [one.title for one in profiles if one.profile.fingerprint.bytes_known == "allocator"]
    measured_words = (
        " All figures are measured unless they are called predicted; intervals say how far noise reaches, and with "
        "which confidence."
    )
    allocator_words = (
        f" Nothing of {listed(pretended, 'profiles')} was measured on a GPU: it is a pretended one, and memory is that "
        "of torch's allocator."
    )
    return (
        f"{several}{place}, torch {first.fingerprint.torch}, {first.provenance.created_utc}."
        f"{measured_words if len(pretended) < len(profiles) else ''}{allocator_words if pretended else ''}"
    )
