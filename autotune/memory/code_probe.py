"""Probe of a step of yours: its request, and what it gives to the probe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from autotune.evidence.peak_contents import ContentsAt
from autotune.machine.measured_device import DeviceChoice
from autotune.memory.probe_limits import ProbeLimits, check_budgets
from autotune.memory.size_probe import FIT_STEPS_OF_CODE, SizeProbe
from autotune.memory.stage import overheads_range, probe_one, tell_budget
from autotune.memory.values import ModelTraceRequest
from autotune.profiles.profile_paths import profile_paths
from autotune.profiles.store import WrittenProfile
from autotune.subjects.bench import SubjectBench, open_subject
from autotune.subjects.subject import Argument, Subject
from autotune.trials.fork_server import ForkServerMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeProbeRequest(ProbeLimits):
    """Request to find the largest size of a step of yours."""

    subject: Subject
    choice: Mapping[str, Argument] = field(default_factory=dict)
    """Settings of the subject besides the size; those that are missing are as the
    subject has them."""
    ranks: int | None = 1
    multiple_of: int = 1
    """Sizes are multiples of it."""
    allow_varying: bool = False
    """True to accept steps of one size that differ in memory."""
    contents: ContentsAt = "none"
    """Sizes at which the contents of memory are recorded."""
    starts_at_most: bool = False
    """True if ``max_size`` is tried first, because it is likely to fit."""
    measures_throughput: bool = True
    """False to search for the largest size alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeProbe:
    """Your step on a machine, with the limits of its probe."""

    bench: SubjectBench
    """Machine on which trials of the step run."""
    limits: CodeProbeRequest
    memory_budget_bytes: int
    """Memory that each rank may use."""
    local_ranks: int = 1
    """Ranks of this node, which take the steps together."""

    @property
    def global_batch_tokens(self) -> None:
        """None: your step decides its global batch."""
        return None

    def settings_at(self, size: int, path: Path) -> Mapping[str, Any]:
        """Return the size and the settings with which it was found."""
        return {"settings": {self.bench.subject.size.name: size, **self.limits.choice}}

    def size_probe(self) -> SizeProbe:
        """Return the search for the largest size, with its limits."""
        bench, request = self.bench, self.limits
        site, server = bench.site, bench.server
        trace = self._trace_request()
        return SizeProbe(
            subject=bench.subject,
            device=site.device,
            memory_budget_bytes=self.memory_budget_bytes,
            max_size=request.max_size,
            fit_steps=FIT_STEPS_OF_CODE,
            fit_choice=request.choice,
            timed_choice=request.choice,
            multiple_of=request.multiple_of,
            headroom_share=request.headroom_share,
            trial_timeout_s=request.trial_timeout_s,
            local_ranks=self.local_ranks,
            device_used_before_bytes=bench.used_before_bytes(self.local_ranks),
            trace=trace,
            overheads=(
                None if trace is None else overheads_range(site, self.local_ranks)
            ),
            allow_varying=request.allow_varying,
            contents=request.contents,
            starts_at_most=request.starts_at_most,
            measures_throughput=request.measures_throughput,
            study_file=request.study_file,
            source_sha256=bench.source_sha256("step"),
            directory=bench.import_directory,
            in_this_process=bench.in_this_process,
            load_modules=(
                server.load
                if isinstance(server, ForkServerMachine) and bench.forked
                else lambda _modules: False
            ),
        )

    def _trace_request(self) -> ModelTraceRequest | None:
        """Return the request for traces of ``build_model``; None if there is none."""
        bench = self.bench
        if bench.model is None or bench.import_directory is None:
            return None
        if not self.limits.traced:
            return None
        step = bench.subject.step(self.limits.choice)
        assert step is not None, f"{bench.subject.words} has no step"
        return ModelTraceRequest(
            model=bench.model,
            arguments=dict(step.arguments),
            along=bench.subject.size.name,
            device=bench.site.device,
            directory=bench.import_directory,
        )


def prepare_code(bench: SubjectBench, request: CodeProbeRequest) -> CodeProbe:
    """Return the probe of a step of yours, and report its memory budget on stderr.

    Raises:
        BadInput: If the device has too little memory or too few GPUs.
    """
    ranks, budget_bytes = request.on(bench.site)
    probe = CodeProbe(
        bench=bench,
        limits=request,
        memory_budget_bytes=budget_bytes,
        local_ranks=ranks,
    )
    tell_budget(bench.site, probe, bench.subject.words)
    return probe


def probe_code(
    device: DeviceChoice,
    requests: Sequence[CodeProbeRequest],
    out: Path | None,
    *,
    ends_s: float | None = None,
) -> list[WrittenProfile]:
    """Find the largest size of each step of yours, and write its profile.

    Args:
        device: Device as you chose it.
        requests: One for each combination of arguments.
        out: File or directory of the profiles; None for the default.
        ends_s: Time after which no trial begins, in seconds since 1970.
    """
    written = []
    for request in requests:
        with open_subject(
            device,
            request.subject,
            import_timeout_s=request.trial_timeout_s,
            check=partial(check_budgets, [request]),
        ) as bench:
            (path,) = profile_paths(out, [bench.subject.name], bench.site.name)
            probe = prepare_code(bench, request)
            written.append(probe_one(bench, probe, path, ends_s=ends_s))
    return written
