"""Parts of training that advice cannot judge, and how to find out. Pure."""

from collections.abc import Iterator

from autotune.evidence.advice import NotJudged
from autotune.evidence.profile import Profile
from autotune.profiles.decide.follow_up import command, probe_command, workers_command


def not_judged(profile: Profile, path: str) -> tuple[NotJudged, ...]:
    """Return what the evidence of a profile cannot tell, the most important first.

    Args:
        profile: The profile.
        path: Its path, for commands.
    """
    return (
        *_of_probe(profile, path),
        *_of_workers(profile, path),
        *_of_ranks(profile, path),
        *_of_step(profile, path),
    )


def _of_probe(profile: Profile, path: str) -> Iterator[NotJudged]:
    probe, again = profile.evidence.probe, probe_command(profile, path)
    if probe is None:
        yield NotJudged(
            part="largest micro-batch",
            reason="no probe",
            command=again,
            is_basic=True,
        )
        return
    if not probe.curve:
        pretended = profile.fingerprint.bytes_known == "allocator"
        yield NotJudged(
            part="throughput by micro-batch size",
            reason=(
                "a pretended GPU has no times" if pretended else "no size was timed"
            ),
            command=again,
        )
    if probe.contents is None and not probe.traced_terms_bytes:
        yield NotJudged(
            part="contents of memory",
            reason=probe.contents_not_recorded or "not recorded",
            command=again,
        )


def _of_workers(profile: Profile, path: str) -> Iterator[NotJudged]:
    workers, sweep = profile.evidence.workers, workers_command(profile, path)
    if workers is None:
        yield NotJudged(
            part="DataLoader workers",
            reason="no sweep",
            command=sweep,
            is_basic=True,
        )
        return
    if all(row.num_workers != profile.num_workers for row in workers.rows):
        yield NotJudged(
            part="data loading",
            reason=f"num_workers={profile.num_workers} was not measured",
            command=sweep,
        )
    if workers.replayed_step_s is not None and profile.fingerprint.device == "cuda":
        yield NotJudged(
            part="use of the GPU",
            reason="the sweep replayed the step",
            remedy="give workers a step that takes batches of the loader (--step)",
        )


def _of_ranks(profile: Profile, path: str) -> Iterator[NotJudged]:
    if profile.local_ranks > 1 and profile.evidence.network is None:
        yield NotJudged(
            part="gradient synchronisation",
            reason=f"{profile.local_ranks} ranks, and no network measurement",
            command=command("network", path),
            is_basic=True,
        )


def _of_step(profile: Profile, path: str) -> Iterator[NotJudged]:
    confirm, workers = profile.evidence.confirm, profile.evidence.workers
    probe = profile.evidence.probe
    if probe is not None and probe.trains:
        yield NotJudged(
            part="kernels",
            reason="a training loop cannot be taken apart",
            remedy="probe a function that builds one step (docs/your-code.md)",
        )
    elif confirm is None or confirm.kernels is None:
        reason = None if confirm is None else confirm.not_profiled
        yield NotJudged(
            part="kernels",
            reason=reason or "the step was not profiled",
            command=command("confirm", path),
        )
    if profile.has_train:
        return
    yield NotJudged(
        part="precision, compilation and parallel strategy",
        reason="they are in your code, which is not read",
        remedy="change one there, probe again, and compare the profiles",
    )
    if workers is not None and not workers.counts_padding:
        yield NotJudged(
            part="padding and MFU",
            reason="the step does not count its work",
            remedy=(
                "give it autotune_facts with units, padded_units and model_flops"
                " (docs/your-code.md#loaders)"
            ),
        )
