"""Probe of any subject, by its interface alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from autotune.evidence.argument import Argument
from autotune.evidence.peak_contents import ContentsAt
from autotune.evidence.profile import Profile
from autotune.memory.probe_budget import overheads_range, tell_budget
from autotune.memory.probe_request import ProbeRequest
from autotune.memory.size_probe import FIT_STEPS_OF_CODE, SizeProbe
from autotune.memory.values import ModelTraceRequest
from autotune.subjects.bench import SubjectBench
from autotune.subjects.subject import Subject
from autotune.trials.fork_server import ForkServerMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectProbeRequest(ProbeRequest):
    """Request to find the largest size of any subject, by its interface alone."""

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

    @property
    def name(self) -> str:
        """Short name of the subject."""
        return self.subject.name

    @property
    def data_dir(self) -> Path | None:
        """None: the subject has its own data."""
        return None

    def requested_subject(self) -> Subject:
        """Return the subject."""
        return self.subject

    def prepare(self, bench: SubjectBench) -> "SubjectProbe":
        """Return the probe on a machine, and report its memory budget on stderr.

        Raises:
            BadInput: If the device has too little memory or too few GPUs.
        """
        ranks, budget_bytes = self.on(bench.site)
        tell_budget(bench.site, self, self.subject.words, budget_bytes)
        return SubjectProbe(
            bench=replace(bench, subject=self.subject),
            request=self,
            memory_budget_bytes=budget_bytes,
            local_ranks=ranks,
        )

    def with_settings(self, settings: Mapping[str, Argument], profile: Profile) -> Self:
        """Return the request for a step with other settings."""
        size = self.subject.size.name
        choice = {name: value for name, value in settings.items() if name != size}
        return replace(self, choice=choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectProbe:
    """A subject on a machine, with the limits of its probe."""

    bench: SubjectBench
    """Machine on which trials of the subject run."""
    request: SubjectProbeRequest
    memory_budget_bytes: int
    """Memory that each rank may use."""
    local_ranks: int = 1
    """Ranks of this node, which take the steps together."""

    @property
    def subject(self) -> Subject:
        """The subject."""
        return self.request.subject

    @property
    def global_batch_tokens(self) -> None:
        """None: your step decides its global batch."""
        return None

    def settings_at(self, size: int, path: Path) -> Mapping[str, Any]:
        """Return the size and the settings with which it was found."""
        return {"settings": {self.bench.subject.size.name: size, **self.request.choice}}

    def size_probe(self) -> SizeProbe:
        """Return the search for the largest size, with its limits."""
        bench, request = self.bench, self.request
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
        if not self.request.traced:
            return None
        step = bench.subject.step(self.request.choice)
        assert step is not None, f"{bench.subject.words} has no step"
        return ModelTraceRequest(
            model=bench.model,
            arguments=dict(step.arguments),
            along=bench.subject.size.name,
            device=bench.site.device,
            directory=bench.import_directory,
        )
