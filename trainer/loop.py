"""Training loop, to be read from top to bottom.

A run is prepared, restored from its checkpoint, warmed up, trained step by step, and
finished. Every rank executes the same code at the same steps and decides alike, as its
decisions follow only from numbers that all ranks share.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from trainer.checkpoint.export import export_model
from trainer.checkpoint.format import TrainingState
from trainer.checkpoint.resume import Start
from trainer.checkpoint.stored_checkpoints import StoredCheckpoint
from trainer.checkpoint.tensors import make_optimizer_state
from trainer.config.resolve import ResolvedConfig
from trainer.data.micro_batch import MicroBatch
from trainer.data.permutation import hash_words
from trainer.data.position import Position
from trainer.distributed.optimizer import learning_rate
from trainer.evaluate import evaluate
from trainer.formats.errors import BadConfig, TrainingFailed
from trainer.formats.events import EventRow, new_event
from trainer.formats.run_record import MODEL_DIRECTORY, RunExit
from trainer.graph_counter import GraphCounter
from trainer.health.controller import HealthDecision
from trainer.health.findings import Action, Finding
from trainer.health.requests import RequestSums, encode_requests
from trainer.health.watchdog import REQUEUE, Watchdog
from trainer.preparation import PreparedRun, prepare_run
from trainer.record.start_clock import Phase, StartClock
from trainer.record.writer import RunWriter, Show
from trainer.runtime.ranks import Ranks


def train(
    resolved: ResolvedConfig,
    ranks: Ranks,
    writer: RunWriter,
    show: Show,
    *,
    start: Start | None = None,
    watchdog: Watchdog | None = None,
    clock: StartClock | None = None,
    environment: Mapping[str, str] | None = None,
) -> RunExit:
    """Train to the end, evaluate and export the model.

    On a signal or near the time limit, save the state and return early. All ranks call
    this function, with the same ``start``.

    Args:
        resolved: Configuration of the run.
        ranks: This process's rank and device.
        writer: Writer of the run record, opened on rank 0.
        show: Callback on rank 0 that shows the run header and each row.
        start: Checkpoint to start from; None starts from scratch.
        watchdog: Watchdog that receives signals; None ignores them.
        clock: Clock that began with the process; None begins now.
        environment: Environment variables that may name a SLURM job; None is empty.

    Returns:
        The exit code and reason, and the newest checkpoint.

    Raises:
        BadConfig: If dataset, model or checkpoint do not match the configuration, or
            ranks do not match each other.
        TrainingFailed: If loss or gradient are unhealthy, and rolling back does not
            help.
    """
    start = start or Start()
    watchdog = watchdog or Watchdog(timeout_s=math.inf)
    clock = clock or StartClock()
    prepared = prepare_run(
        resolved,
        ranks,
        writer,
        show,
        start=start,
        watchdog=watchdog,
        clock=clock,
        environment=environment or {},
    )
    run = _Run(prepared, ranks, writer, start=start, watchdog=watchdog, clock=clock)
    return run.train()


class _Run:
    """One rank's part of a run: its state, and the phases of training in order."""

    def __init__(
        self,
        prepared: PreparedRun,
        ranks: Ranks,
        writer: RunWriter,
        *,
        start: Start,
        watchdog: Watchdog,
        clock: StartClock,
    ) -> None:
        self._resolved = prepared.resolved
        self._config = prepared.config
        self._dataset = prepared.dataset
        self._validation = prepared.validation
        self._training = prepared.training
        self._meter = prepared.meter
        self._gpu_reader = prepared.gpu_reader
        self._checkpoints = prepared.checkpoints
        self._loader = prepared.loader
        self._controller = prepared.controller
        self._budget = prepared.budget
        self._ranks = ranks
        self._writer = writer
        self._start = start
        self._watchdog = watchdog
        self._clock = clock
        self._graphs = GraphCounter()
        self._finished_steps = 0
        """Number of finished optimizer steps, without those that were rolled back."""
        self._learning_rate = 0.0
        """Learning rate of the last step."""
        self._evaluation_s = 0.0
        """Duration of the evaluation after the current step, in seconds; 0 if there was
        none."""

    def train(self) -> RunExit:
        """Train from the first step, or from the checkpoint, to the last step."""
        self._phase_ended("build")
        self._restore()
        self._phase_ended("restore")
        if self._finished_steps < self._config.max_steps:
            self._warm_up()
        try:
            self._gpu_reader.start()
            return self._take_steps()
        except Exception:
            self._checkpoints.abandon()
            raise
        finally:
            self._gpu_reader.close()
            self._loader.close()

    def _restore(self) -> None:
        """Restore the checkpoint to start from, if there is one."""
        manifest = self._start.manifest
        path = self._start.checkpoint
        if manifest is None or path is None:
            return
        state = manifest.state
        if state.dataset_hash != self._dataset.manifest.dataset_hash:
            raise BadConfig(
                f"dataset {self._resolved.data_dir} does not match checkpoint {path},"
                f" whose dataset has the hash {state.dataset_hash[:12]}…",
                next_step=(
                    "Pass that dataset with --data DIR, or start from scratch with"
                    " another --out."
                ),
            )
        self._checkpoints.restore(path, manifest)
        self._finished_steps = state.step
        self._loader.position = state.position
        self._controller.restore(state.health, state.skipped_steps)
        if self._start.gave_up:
            self._controller.monitor.reset_rollback_count()
        self._meter.noise.signal_and_noise = state.noise_scale
        self._training.module.fixed_sizes.overflows = state.head_overflows

    def _warm_up(self) -> None:
        """Start the loader, compile, and save a first checkpoint.

        The first step then waits for none of these.
        """
        self._loader.start_at(self._loader.position)
        first_batches = self._loader.wait_for_first()
        self._phase_ended("first_batch")
        self._loader.check_first_step()

        # Before any activation, against fragmentation.
        make_optimizer_state(self._training)
        sizes = self._training.module.fixed_sizes
        sizes.expect_documents(first_batches[0])
        overflows = sizes.overflows
        self._training.step.rehearse(first_batches[0])
        sizes.overflows = overflows  # the rehearsal is no step of the run
        self._phase_ended("compile")

        if self._checkpoints.enabled and not self._starts_from_own_checkpoint():
            self._save()  # to roll back to, and to resume from
        self._training.step.progressed = self._watchdog.heartbeat
        self._meter.restart()

    def _starts_from_own_checkpoint(self) -> bool:
        """Return whether the run already has the checkpoint that it starts from."""
        origin = self._start.checkpoint
        return (
            origin is not None
            and self._checkpoints.owns(origin)
            and not self._start.gave_up
        )

    def _take_steps(self) -> RunExit:
        """Take optimizer steps until the last one, or until a reason to exit."""
        while True:
            stop_reason = self._step_until_stopped()
            if stop_reason is not None:
                return self._exit_early(stop_reason)
            # On a GPU, the metrics of the last steps are still unchecked; they may
            # require a rollback, after which these steps are taken again.
            decision = self._controller.check(wait_for_all=True)
            if not self._handle_trouble(decision):
                return self._finish()

    def _step_until_stopped(self) -> str | None:
        """Take optimizer steps until the last one.

        Returns:
            The reason to exit before the last step, if any.
        """
        while self._finished_steps < self._config.max_steps:
            began_s = time.monotonic()
            self._evaluation_s = 0.0
            batches = self._loader.next_step(self._meter.take)
            if not batches:
                return None  # end of the last epoch
            decision = self._take_step(batches)
            stop_reason = self._act_on(decision)
            is_last = self._finished_steps >= self._config.max_steps
            if stop_reason is not None and not is_last:
                return stop_reason
            step_s = time.monotonic() - began_s - self._evaluation_s
            self._budget.step_s.append(step_s)
        return None

    def _take_step(self, batches: Sequence[MicroBatch]) -> HealthDecision:
        """Take one optimizer step, and log and evaluate if it is due.

        Returns:
            The decision about the steps whose numbers have arrived: on a GPU, earlier
            ones than this step.
        """
        step = self._finished_steps + 1
        evaluation_due = self._evaluation_is_due(step)
        logging_due = evaluation_due or self._logging_is_due(step)
        self._seed_dropout()
        scheduled_rate = learning_rate(self._config, self._finished_steps)
        health = self._controller.monitor
        self._learning_rate = scheduled_rate * health.learning_rate_share(
            self._finished_steps
        )
        result = self._training.step.run(
            batches,
            self._learning_rate,
            measure_partial=logging_due,
            values=self._requests(evaluation_due=evaluation_due),
            limits=health.limits(),
        )
        self._finished_steps = step
        self._controller.add(step, result, self._loader.samples)
        decision = self._controller.check()
        self._meter.add(batches, result)
        self._graphs.stepped()
        self._watchdog.heartbeat(step)

        if logging_due:
            self._close_interval()
        self._write_metrics()
        if evaluation_due and step < self._config.max_steps:
            self._evaluate()
            self._meter.restart()
        self._write_startup_times()
        return decision

    def _logging_is_due(self, step: int) -> bool:
        """Return whether the metrics up to a step are logged after it."""
        return step % self._config.logged_steps == 0 or step == self._config.max_steps

    def _evaluation_is_due(self, step: int) -> bool:
        """Return whether a step is a multiple of the evaluation interval."""
        interval_steps = self._config.evaluation.interval_steps
        return (
            len(self._validation) > 0
            and interval_steps is not None
            and step % interval_steps == 0
        )

    def _seed_dropout(self) -> None:
        """Seed the dropout of the next step.

        The seed depends only on that of the run, the position in the data and the rank,
        so checkpoints store no state of random number generators.
        """
        words = hash_words(
            self._config.seed, self._loader.position.steps, self._ranks.rank
        )
        seed = words[0] >> np.uint64(1)  # fits a signed integer
        torch.manual_seed(int(seed))

    def _requests(self, *, evaluation_due: bool) -> RequestSums:
        """Return this rank's requests to exit or save, to be summed over all ranks.

        A rank requests to exit after a signal. Only rank 0 requests to exit or save by
        its clock, as clocks of ranks differ.

        Args:
            evaluation_due: Whether an evaluation follows this step, which takes time
                from the rest of the run.
        """
        leads = self._ranks.leads
        time_is_over = leads and self._budget.is_over(
            save_s=self._checkpoints.expected_duration_s, evaluation_due=evaluation_due
        )
        return encode_requests(
            rank=self._ranks.rank,
            signal_number=self._watchdog.first_signal,
            time_is_over=time_is_over,
            save_is_due=leads and self._checkpoints.is_due_by_time(),
        )

    def _act_on(self, decision: HealthDecision) -> str | None:
        """Roll back, give up or save as a decision requires.

        Returns:
            The reason to exit, if any.

        Raises:
            TrainingFailed: If the decision is to give up.
        """
        self._checkpoints.report_finished()
        if self._handle_trouble(decision):
            return decision.stop_reason
        if decision.stop_reason is None and self._checkpoints.is_due(
            self._finished_steps, decision.save_requested_at
        ):
            return self._save_if_healthy()
        return decision.stop_reason

    def _handle_trouble(self, decision: HealthDecision) -> bool:
        """Roll back or give up if a decision requires it.

        Returns:
            True after a rollback.

        Raises:
            TrainingFailed: If the decision is to give up.
        """
        trouble = decision.trouble
        if trouble is None:
            return False
        if trouble.action is Action.GIVE_UP:
            self._checkpoints.wait()
            raise TrainingFailed(trouble.message, next_step=trouble.next_step)
        self._roll_back(trouble, decision.at_step)
        return True

    def _save_if_healthy(self) -> str | None:
        """Save, unless the steps not checked yet require a rollback or an exit.

        Returns:
            The reason to exit, if any.
        """
        # On a GPU, the numbers of a step are read two steps later. If the run saves
        # every two steps, only this check reads any, so requests to exit are honoured
        # here too.
        decision = self._controller.check(wait_for_all=True)
        if not self._handle_trouble(decision) and decision.stop_reason is None:
            self._write_metrics(wait_for_all=True)
            self._save()
        return decision.stop_reason

    def _save(self, *, wait: bool = False) -> None:
        """Save the state after the last step, in the background unless ``wait``."""
        health = self._controller.monitor
        state = TrainingState(
            step=self._finished_steps,
            position=self._loader.job_position(),
            config=self._resolved.config.model_dump(mode="json"),
            config_sha256=self._resolved.config_sha256,
            dataset_hash=self._dataset.manifest.dataset_hash,
            world_size=self._ranks.world_size,
            good=health.is_rollback_target,
            health=health.to_json(),
            noise_scale=self._meter.noise.signal_and_noise,
            head_overflows=self._training.module.fixed_sizes.overflows,
            skipped_steps=self._controller.skipped_steps,
        )
        self._checkpoints.save(state, rollbacks=health.recovery.rollbacks, wait=wait)

    def _roll_back(self, trouble: Finding, at_step: int) -> None:
        """Restore the last good checkpoint, and skip the data since then.

        Args:
            trouble: Finding that requires the rollback.
            at_step: Step of the finding.
        """
        checkpoint = self._checkpoints.newest_good()
        state = checkpoint.manifest.state
        # The data after the checkpoint may be the cause, so it is not read again.
        resume_position = self._loader.job_position()
        self._checkpoints.restore(checkpoint.path, checkpoint.manifest)
        self._controller.roll_back(state.health, at_step=at_step, to_step=state.step)
        undone_step = self._finished_steps
        self._finished_steps = state.step
        self._meter.discard()
        self._loader.start_at(resume_position)
        self._writer.append(
            self._rollback_event(trouble, undone_step, checkpoint, resume_position)
        )
        self._save()

    def _rollback_event(
        self,
        trouble: Finding,
        undone_step: int,
        checkpoint: StoredCheckpoint,
        resume_position: Position,
    ) -> EventRow:
        """Return the event of a rollback to a checkpoint."""
        state = checkpoint.manifest.state
        health = self._controller.monitor
        learning_rate_share = health.learning_rate_share(state.step)
        message = (
            f"rolled back from step {undone_step} to {checkpoint.path.name}; sequences"
            f" {state.position.rows:,} to {resume_position.rows:,} are skipped, and the"
            f" learning rate is {learning_rate_share:.3g} of its schedule for now"
        )
        return new_event(
            state.step,
            "rolled_back",
            message,
            values={
                "from_step": undone_step,
                "to_step": state.step,
                "first_row_left_out": state.position.rows,
                "first_row_after": resume_position.rows,
                "learning_rate_share": learning_rate_share,
                "rollbacks": health.recovery.rollbacks,
            },
            level="error",
            action="rollback",
            next_step=trouble.next_step,
        )

    def _exit_early(self, reason: str) -> RunExit:
        """Save, and return an exit after which a restart resumes the run."""
        decision = self._controller.check(wait_for_all=True)
        rolled_back = self._handle_trouble(decision)
        self._write_metrics(wait_for_all=True)
        if self._checkpoints.enabled and not rolled_back:  # a rollback has saved
            self._save(wait=True)
        self._checkpoints.wait()
        is_saved = self._checkpoints.has_saved(self._finished_steps)
        saved = "saved" if is_saved else "not saved"
        message = f"{reason}: step {self._finished_steps} is {saved}"
        self._writer.append(new_event(self._finished_steps, "stopped", message))
        self._writer.close()
        newest = self._newest_checkpoint()
        return self._clock.exit(
            REQUEUE,
            f"{reason}; run the same command again to resume from"
            f" {newest or 'the beginning'}",
            self._finished_steps,
            newest,
        )

    def _finish(self) -> RunExit:
        """Save, evaluate, and export the model."""
        if self._meter.open_steps:  # the last epoch ended between two logged steps
            self._close_interval()
        self._write_metrics(wait_for_all=True)
        self._checkpoints.wait()
        if self._last_step_is_unsaved():
            # Before the evaluation, so that a kill during it loses no step.
            self._save()
        if len(self._validation):
            self._evaluate()
        self._checkpoints.wait()
        if self._last_step_is_unsaved():
            self._save(wait=True)
        self._writer.close()
        self._watchdog.heartbeat()
        export_model(
            self._training.module,
            dataset_dir=self._resolved.data_dir,
            special_ids=self._dataset.manifest.special_ids,
            seq_length_tokens=self._config.seq_length_tokens,
            directory=self._writer.directory / MODEL_DIRECTORY,
            leads=self._ranks.leads,
        )
        return self._clock.exit(
            0, "finished", self._finished_steps, self._newest_checkpoint()
        )

    def _last_step_is_unsaved(self) -> bool:
        """Return whether the last step is not saved yet; all ranks call this method."""
        return self._checkpoints.enabled and not self._checkpoints.has_saved(
            self._finished_steps
        )

    def _newest_checkpoint(self) -> str | None:
        """Return the name of the checkpoint from which a restart resumes.

        It is a path if the checkpoint belongs to another run, and None if there is
        none.
        """
        return self._checkpoints.newest or self._start.origin

    def _evaluate(self) -> None:
        """Evaluate the model, and record the result."""
        with self._graphs.paused():
            row = evaluate(
                self._training.module,
                self._validation,
                self._config,
                self._ranks,
                self._finished_steps,
                progressed=self._watchdog.heartbeat,
            )
        self._evaluation_s = row.seconds
        self._budget.evaluation_s = row.seconds
        self._writer.append(row)

    def _close_interval(self) -> None:
        """End the interval over which the next logged row has the mean metrics."""
        self._meter.close(
            self._finished_steps,
            learning_rate=self._learning_rate,
            head_overflows=self._training.module.fixed_sizes.overflows,
            recompilations=self._graphs.recompilations,
            skipped_steps=self._controller.skipped_steps,
        )

    def _write_metrics(self, *, wait_for_all: bool = False) -> None:
        """Record the metrics that have arrived on the host.

        ``wait_for_all`` waits for those of all steps.
        """
        for row in self._meter.take_rows(wait_for_all=wait_for_all):
            self._writer.append(row)
        for finding in self._meter.take_findings():
            self._writer.append(finding.event(self._finished_steps))
        self._report_unread_gpus()

    def _report_unread_gpus(self) -> None:
        """Report once if the GPUs of this node can no longer be read."""
        reason = self._gpu_reader.take_loss()
        if reason is None:
            return
        message = (
            f"GPU activity of the node of rank {self._ranks.rank} is no longer"
            f" complete: {reason}"
        )
        self._writer.append(
            new_event(self._finished_steps, "gpu_unread", message, level="warning")
        )
        if not self._ranks.leads:  # its writer records nothing
            sys.stderr.write(f"warning: {message}\n")

    def _phase_ended(self, phase: Phase) -> None:
        """Note the time of a startup phase, which is also a sign of progress."""
        self._clock.ended(phase)
        self._watchdog.heartbeat(self._finished_steps)

    def _write_startup_times(self) -> None:
        """Record the startup times once the device has finished the first step."""
        if self._clock.is_over:
            return
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize()
        self._clock.ended("first_step")
        self._clock.is_over = True
        self._writer.write_startup(self._clock.startup())
