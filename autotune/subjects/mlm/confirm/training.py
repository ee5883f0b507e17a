"""Training of the bundled trainer, to be confirmed."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.base.units import format_seconds
from autotune.confirm.decide import micro_batches_of_window, rivals
from autotune.confirm.profile_kernels import profile_kernels
from autotune.evidence.confirm import ConfirmEvidence, SplitRates
from autotune.evidence.kernels import StepKernels
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.machine.measured_device import local_ranks
from autotune.memory.size_probe import KERNEL_STEPS, step_fields
from autotune.memory.values import KernelsRequest
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.profiles.decide.micro_batch import measured_splits
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import StoredProfile
from autotune.subjects.bench import SubjectBench
from autotune.subjects.mlm.confirm.short_training import END_TIMEOUT_S, ShortTraining
from autotune.subjects.mlm.confirm.values import ShortTrainingRequest
from autotune.subjects.mlm.memory.contents import contents_of
from autotune.subjects.mlm.subject import MlmSubject
from autotune.subjects.mlm.workers.windows import training_trial, training_windows
from autotune.trials.job_figures import WindowFigures
from autotune.trials.outcomes import Outcome
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.values import Trial
from autotune.workers.decide.window_time import MOST_MICRO_BATCHES
from autotune.workers.windows import SubjectWindows

MIN_STEPS = 2
"""Fewest optimizer steps of a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlmTraining:
    """Training from a profile of the bundled trainer.

    Splits of the global batch that are nearly as fast as the chosen one are measured,
    too.
    """

    bench: SubjectBench
    """Machine on which trials of the model run."""
    stored: StoredProfile
    probe: ProbeEvidence
    """Evidence of the profile's probe."""
    sizes: Sequence[int]
    windows: SubjectWindows[MlmSubject]
    """Windows of the profile's training."""

    @property
    def size_name(self) -> str:
        """Name of the size, for labels."""
        return "micro-batch"

    @property
    def num_workers(self) -> int:
        """DataLoader workers of each rank."""
        return self.windows.subject.config.data.num_workers

    @property
    def not_verified(self) -> str | None:
        """None: the trainer's own command trains with all settings."""
        return None

    def window(self, size: int, number: int, names: Sequence[str]) -> Trial:
        """Return the trial of a window, as for ``ConfirmedTraining``."""
        config = self.windows.subject.config.model_copy(
            update={"micro_batch_size": size}
        )
        return training_trial(
            self.windows,
            config,
            number,
            names,
            min_steps=MIN_STEPS,
            most_micro_batches=micro_batches_of_window(
                self.accumulation_steps(size), size, self.probe.curve
            ),
        )

    def accumulation_steps(self, size: int) -> int:
        """Return the micro-batches of each rank in a step of training."""
        ranks = self.windows.local_ranks
        global_batch_size = max(self.windows.subject.config.global_batch_size, ranks)
        split = split_global_batch(global_batch_size, size, ranks)
        return split.gradient_accumulation_steps

    def rate(self, size: int, figures: WindowFigures) -> float:
        """Return the non-padding tokens/s of training that a window shows.

        A step of training may have empty sequences, which a window has not. Its tokens
        are those of average sequences, so that the samples of a window add no noise.
        """
        config = self.windows.subject.config
        sequences = self.accumulation_steps(size) * size * self.windows.local_ranks
        non_empty_share = config.global_batch_size / sequences
        non_padding_share = self.probe.tokens_per_sequence / config.seq_length_tokens
        return figures.padded_units_per_s * non_empty_share * non_padding_share

    def kernels(self, runner: TrialRunner, split: SplitRates) -> StepKernels | str:
        """Return the kernels of a step, or the reason why they were not profiled."""
        subject, sweep = self.windows.subject, self.windows.request
        train = subject.config
        documents = 1.0
        if train.layout == "packed":
            contents = contents_of(sweep.data, train.layout, train.seq_length_tokens)
            documents = max(1.0, contents.mean_samples)
        micro_batches = min(split.gradient_accumulation_steps, MOST_MICRO_BATCHES)
        request = KernelsRequest(
            **step_fields(
                subject.model_copy(update={"documents_per_sequence": documents}),
                {
                    "micro_batch_size": split.micro_batch_size,
                    "micro_batches": micro_batches,
                },
                KERNEL_STEPS[train.device],
                device=train.device,
                local_ranks=subject.local_ranks,
            ),
            memory_budget_bytes=None,
            document_tokens=train.seq_length_tokens / documents,
        )
        return profile_kernels(
            runner,
            request,
            train.model.name,
            timeout_s=sweep.trial_timeout_s,
        )

    def confirmed(
        self, profile: Profile, evidence: ConfirmEvidence, runner: TrialRunner
    ) -> Profile:
        """Return a profile with the evidence, and the micro-batch that it chose."""
        size = evidence.rows[0].micro_batch_size
        return add_evidence(
            profile, "confirm", evidence, runner, profile.with_size(size)
        )

    def train(
        self, profile: Profile, runner: TrialRunner, seconds: float
    ) -> tuple[Outcome, str]:
        """Train by the trainer's own loop, as for ``ConfirmedTraining``."""
        evidence = profile.evidence.confirm
        assert evidence is not None, "windows come before the training"
        train = profile.train
        tokens_per_step = train.global_batch_size * self.probe.tokens_per_sequence
        step_s = tokens_per_step / evidence.promised_tokens_per_s
        request = ShortTrainingRequest(
            config=train,
            seconds=seconds,
            step_s=step_s,
            local_ranks=evidence.local_ranks,
        )
        training = ShortTraining(
            profile=self.stored.path,
            data=self.windows.request.data,
            torch_version=self.bench.site.versions["torch"],
        )

        def train_in_ranks(trial: Trial) -> Outcome:
            # Time in the ranks is no overhead of the tuning, as in trials.
            with self.bench.server.waiting():
                return training.run_trial(trial)

        outcome = runner.run(
            request.trial(timeout_s=seconds + 2 * END_TIMEOUT_S),
            f"training by the trainer's own loop, {format_seconds(seconds)}",
            measure_by=train_in_ranks,
        )
        return outcome, (
            f"{format_seconds(seconds)} are too short for a start and steps of about"
            f" {format_seconds(step_s)}"
        )


def training_of(
    bench: SubjectBench, stored: StoredProfile, request: SweepRequest
) -> MlmTraining:
    """Return the training of a profile, in windows of a request.

    It is the part of ``autotune.confirm.stage`` that knows the trainer's global batch.

    Raises:
        ProfileRejected: If the profile is of another machine, model or dataset.
    """
    train = stored.profile.train
    probe = require_local_probe(stored, bench.fingerprint)
    ranks = local_ranks(bench.site, request.local_ranks or probe.local_ranks)
    steps = measured_splits(
        probe.curve, global_batch_size=train.global_batch_size, ranks=ranks
    )
    size = train.micro_batch_size
    return MlmTraining(
        bench=bench,
        stored=stored,
        probe=probe,
        sizes=[size, *rivals(steps, size)],
        windows=training_windows(bench, train, request, ranks),
    )
