"""Training loop, readable top to bottom."""

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from trainer.build import GraphCounter, build_training
from trainer.checkpoint.format import (
    CHECKPOINTS_DIRECTORY,
    TrainingState,
    list_checkpoints,
)
from trainer.checkpoint.manager import CheckpointManager, state_bytes
from trainer.checkpoint.resume import Start
from trainer.checkpoint.tensors import export_model, make_state
from trainer.config.resolve import ResolvedConfig, with_compile
from trainer.data.batch_plan import hash_words
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import make_plan, with_batch_in_sequences
from trainer.data.loader import MicroBatch, MicroBatchLoader
from trainer.distributed.optimizer import learning_rate
from trainer.distributed.ranks import Ranks, open_libraries
from trainer.errors import BadConfig, TrainingFailed
from trainer.evaluate import evaluate
from trainer.health.controller import HealthController, HealthDecision, encode_requests
from trainer.health.events import Action, Diagnosis, new_event
from trainer.health.watchdog import REQUEUE, TimeBudget, Watchdog, slurm_left_s
from trainer.preflight import check_directory, check_ranks, describe_run, open_dataset
from trainer.record.boards import open_boards
from trainer.record.meter import Meter
from trainer.record.run_record import MODEL_DIRECTORY, Phase, RunExit, StartClock
from trainer.record.writer import RunWriter, Show


def train(
    resolved: ResolvedConfig,
    ranks: Ranks,
    writer: RunWriter,
    show: Show,
    *,
    start: Start | None = None,
    watch: Watchdog | None = None,
    clock: StartClock | None = None,
    environment: Mapping[str, str] | None = None,
) -> RunExit:
    """Train to the end, evaluate and export the model.

    Or, on a signal or time limit, save the state and return.

    All ranks call it, with the same ``start``; by default it starts from scratch. Raise
    ``BadConfig`` if dataset, model or checkpoint do not match the configuration, or
    ranks do not match each other, ``TrainingFailed`` if loss or gradient are unhealthy,
    and rolling back does not help.
    """
    watch = watch or Watchdog(timeout_s=math.inf)
    run = _Run(
        resolved,
        ranks,
        writer,
        show,
        start=start or Start(),
        watch=watch,
        clock=clock or StartClock(),
    )
    return run.train(environment or {})


class _Run:
    """State of a run, and the phases of training."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        ranks: Ranks,
        writer: RunWriter,
        show: Show,
        *,
        start: Start,
        watch: Watchdog,
        clock: StartClock,
    ) -> None:
        transformers_logging.disable_progress_bar()  # the run has its own progress bar
        resolved, not_compiled = with_compile(resolved)
        self._resolved, self._ranks, self._writer = resolved, ranks, writer
        self._start, self._watch, self._clock = start, watch, clock
        self._dataset = dataset = open_dataset(resolved)
        remarks, hosts = check_ranks(resolved, dataset.manifest.dataset_hash, ranks)
        if not_compiled is not None:
            next_step = "Install it, or accept this with --set train.compile=false"
            remarks.append(
                new_event(
                    0, "preflight", not_compiled, level="warning", next_step=next_step
                )
            )
        self._validation = TokenDataset(
            dataset.directory, dataset.manifest, "validation"
        )
        self._config = config = with_batch_in_sequences(resolved.config, dataset)
        self._plan = make_plan(config, len(dataset), ranks.world_size)
        open_libraries(ranks)
        self._training = build_training(
            config, dataset.manifest.vocab_size, dataset.manifest.special_ids, ranks
        )
        if (why := self._training.module.against_copies) is not None:
            message = (
                f"weights of {config.model.config['model_type']!r} are cast to bf16 in"
                f" every micro-batch: {why}"
            )
            remarks.append(new_event(0, "preflight", message, level="info"))
        if config.checkpoint.enabled:
            there = (
                len(list_checkpoints(writer.directory / CHECKPOINTS_DIRECTORY))
                if ranks.leads
                else 0
            )
            remarks += check_directory(
                writer, config, state_bytes(self._training), there, ranks
            )
        header = describe_run(
            resolved,
            dataset,
            self._plan,
            self._training,
            hosts=hosts,
            ranks=ranks,
            start=start,
        )
        self._meter = Meter(
            self._training.work,
            ranks,
            peak_flops_per_s=header.peak_flops_per_s,
            hosts=hosts,
        )
        self._graphs, attempt = GraphCounter(), writer.attempt
        log_to = config.log_to if ranks.leads else ()
        writer.start(
            header,
            show,
            open_boards(log_to, writer.directory, header, attempt, remarks.append),
        )
        self._checkpoints = CheckpointManager(
            writer.directory,
            config,
            self._training,
            ranks,
            attempt=attempt,
            report_event=writer.append,
            progressed=watch.heartbeat,
        )
        self._loader = MicroBatchLoader(dataset, config, self._plan, ranks)
        self._done = 0
        for event in (*start.events, *remarks):
            writer.append(event)

    def train(self, environment: Mapping[str, str]) -> RunExit:
        """Train from the first step, or from the checkpoint, to the last step."""
        left_s = slurm_left_s(environment) if self._ranks.leads else None
        self._budget = TimeBudget(
            self._config.stop_after_s, self._clock.monotonic_start_s, left_s
        )
        self._controller = HealthController(
            self._config, self._ranks, self._writer.append
        )
        self._ended("build")
        self._go_on()
        self._ended("restore")
        if self._done < self._config.max_steps:
            self._begin()
        try:
            return self._take_steps()
        except Exception:
            self._checkpoints.abandon()
            raise
        finally:
            self._loader.close()

    def _take_steps(self) -> RunExit:
        while True:
            while self._done < self._config.max_steps:
                began_s = time.monotonic()
                self._evaluated_s = 0.0
                batches = self._loader.next_step(self._meter.take)
                if not batches:
                    break  # end of the last epoch
                reason = self._act(self._step(batches))
                if reason is not None and self._done < self._config.max_steps:
                    return self._leave(reason)
                self._budget.step_s.append(
                    time.monotonic() - began_s - self._evaluated_s
                )
            # On a GPU, the metrics of the last steps are still unchecked.
            if not self._in_trouble(self._controller.check(wait_for_all=True)):
                return self._finish()

    def _in_trouble(self, verdict: HealthDecision) -> bool:
        """Roll back or give up if a verdict requires it; return whether it did."""
        if verdict.trouble is not None:
            self._act(verdict)
        return verdict.trouble is not None

    def _go_on(self) -> None:
        """Restore the checkpoint to start from, if there is one."""
        manifest, path = self._start.manifest, self._start.checkpoint
        if manifest is None or path is None:
            return
        state = manifest.state
        if state.dataset_hash != self._dataset.manifest.dataset_hash:
            what = (
                f"dataset {self._resolved.data_dir} does not match checkpoint {path},"
                " whose dataset has the hash "
            )
            next_step = (
                "Pass that dataset with --data DIR, or start from scratch with another"
                " --out."
            )
            raise BadConfig(f"{what}{state.dataset_hash[:12]}…", next_step=next_step)
        self._checkpoints.restore(path, manifest)
        self._done, self._loader.position = state.step, state.position
        self._controller.restore(state.health, state.skipped_steps)
        if self._start.gave_up:
            self._controller.health.reset_rollback_count()
        self._meter.noise.parts = state.noise_scale
        self._training.module.overflows = state.head_overflows

    def _begin(self) -> None:
        """Start the loader, compile, and save a first checkpoint, so that the first step does not wait for these."""
        self._loader.start_at(self._loader.position)
        first = self._loader.wait_for_first()
        self._ended("first_batch")
        self._loader.check_first_step()
        overflows = self._training.module.overflows
        make_state(self._training)  # before any activation, against fragmentation
        self._training.module.expect_documents(first[0])
        self._training.step.rehearse(first[0])
        self._training.module.overflows = overflows
        self._ended("compile")
        before = self._start.checkpoint
        if self._checkpoints.enabled and (
            before is None or not self._checkpoints.owns(before) or self._start.gave_up
        ):
            self._save()  # to roll back to, and to resume from
        self._training.step.progressed = self._watch.heartbeat
        self._meter.restart()

    def _ended(self, phase: Phase) -> None:
        self._clock.ended(phase)
        self._watch.heartbeat(self._done)

    def _step(self, batches: Sequence[MicroBatch]) -> HealthDecision:
        config, done = self._config, self._done + 1
        interval_steps = config.evaluation.interval_steps
        evaluation_due = bool(
            len(self._validation) and interval_steps and done % interval_steps == 0
        )
        row_due = (
            done % config.logged_steps == 0
            or done == config.max_steps
            or evaluation_due
        )
        # Dropout depends only on the position in the data and the rank, so there is no
        # state to save.
        seed = hash_words(config.seed, self._loader.position.steps, self._ranks.rank)[
            0
        ] >> np.uint64(1)
        torch.manual_seed(int(seed))
        self._lr = learning_rate(
            config, self._done
        ) * self._controller.health.learning_rate_share(self._done)
        leads = self._ranks.leads
        over = leads and self._budget.is_over(
            save_s=self._checkpoints.save_s, evaluation_due=evaluation_due
        )
        due, signalled = (
            leads and self._checkpoints.is_due_by_time(),
            self._watch.first_signal,
        )
        flags = encode_requests(
            rank=self._ranks.rank,
            signal_number=signalled,
            time_is_over=over,
            save_is_due=due,
        )
        limits = self._controller.health.limits()
        result = self._training.step.run(
            batches, self._lr, measure_partial=row_due, limits=limits, values=flags
        )
        self._done = done
        self._controller.add(done, result, self._loader.samples)
        verdict = self._controller.check()
        self._meter.add(batches, result)
        self._graphs.stepped()
        self._watch.heartbeat(done)
        if row_due:
            self._close_row()
        self._write_rows()
        if evaluation_due and done < config.max_steps:
            self._evaluate()
            self._meter.restart()
        self._tell_startup()
        return verdict

    def _act(self, verdict: HealthDecision) -> str | None:
        """Roll back, give up or save as a verdict requires.

        Return the reason to exit, if any.
        """
        self._checkpoints.report_finished()
        trouble = verdict.trouble
        if trouble is not None and trouble.action is Action.GIVE_UP:
            self._checkpoints.wait()
            raise TrainingFailed(trouble.message, next_step=trouble.next_step)
        if trouble is not None:
            self._roll_back(trouble, verdict.at_step)
        elif verdict.stop_reason is None and self._checkpoints.is_due(
            self._done, verdict.save_requested_at
        ):
            return self._save_if_well()
        return verdict.stop_reason

    def _save_if_well(self) -> str | None:
        """Save, unless the metrics of the remaining steps require a rollback or an exit; return that reason."""
        # Needed on a GPU with a save every two steps, where nothing else reads the
        # requests of ranks.
        verdict = self._controller.check(wait_for_all=True)
        if not self._in_trouble(verdict) and verdict.stop_reason is None:
            self._write_rows(all_of_them=True)
            self._save()
        return verdict.stop_reason

    def _roll_back(self, trouble: Diagnosis, at_step: int) -> None:
        """Restore the last good checkpoint, and skip the data since then."""
        path, manifest = self._checkpoints.newest_good()
        behind, to = self._loader.job_position(), manifest.state
        self._checkpoints.restore(path, manifest)
        self._controller.roll_back(to.health, at_step=at_step, to_step=to.step)
        undone, self._done = self._done, to.step
        self._meter.forget()
        self._loader.start_at(behind)
        health = self._controller.health
        share = health.learning_rate_share(to.step)
        values = {
            "from_step": undone,
            "to_step": to.step,
            "first_row_left_out": to.position.rows,
            "first_row_after": behind.rows,
            "learning_rate_share": share,
            "rollbacks": health.recovery.rollbacks,
        }
        skipped = f"sequences {to.position.rows:,} to {behind.rows:,} are skipped"
        eased = f"the learning rate is {share:.3g} of its schedule for now"
        message = (
            f"rolled back from step {undone} to {path.name}; {skipped}, and {eased}"
        )
        told = {"level": "error", "action": "rollback", "next_step": trouble.next_step}
        self._writer.append(
            new_event(to.step, "rolled_back", message, values=values, **told)
        )
        self._save()

    def _save(self, *, wait: bool = False) -> None:
        state = TrainingState(
            step=self._done,
            position=self._loader.job_position(),
            config=self._resolved.config.model_dump(mode="json"),
            config_sha256=self._resolved.config_sha256,
            dataset_hash=self._dataset.manifest.dataset_hash,
            world_size=self._ranks.world_size,
            good=self._controller.health.calm,
            health=self._controller.health.to_json(),
            noise_scale=self._meter.noise.parts,
            head_overflows=self._training.module.overflows,
            skipped_steps=self._controller.skipped_steps,
        )
        self._checkpoints.save(
            state, rollbacks=self._controller.health.recovery.rollbacks, wait=wait
        )

    def _leave(self, reason: str) -> RunExit:
        """Save, and return an exit after which a restart resumes the run."""
        in_trouble = self._in_trouble(self._controller.check(wait_for_all=True))
        self._write_rows(all_of_them=True)
        if self._checkpoints.enabled and not in_trouble:
            self._save(wait=True)
        self._checkpoints.wait()
        saved = "saved" if self._checkpoints.has_saved(self._done) else "not saved"
        self._writer.append(
            new_event(self._done, "stopped", f"{reason}: step {self._done} is {saved}")
        )
        self._writer.close()
        newest = self._checkpoints.newest or self._start.origin
        told = (
            f"{reason}; run the same command again to resume from"
            f" {newest or 'the beginning'}"
        )
        return self._clock.exit(REQUEUE, told, self._done, newest)

    def _finish(self) -> RunExit:
        """Save, evaluate, and export the model."""
        if self._meter.open_steps:  # the last epoch ended between two logged steps
            self._close_row()
        self._write_rows(all_of_them=True)
        self._checkpoints.wait()
        if self._checkpoints.enabled and not self._checkpoints.has_saved(self._done):
            # Before the evaluation, so that a kill during it loses no step.
            self._save()
        if len(self._validation):
            self._evaluate()
        self._checkpoints.wait()
        if self._checkpoints.enabled and not self._checkpoints.has_saved(self._done):
            self._save(wait=True)
        self._writer.close()
        self._watch.heartbeat()
        export_model(
            self._training.module,
            dataset_dir=self._resolved.data_dir,
            special_ids=self._dataset.manifest.special_ids,
            seq_length_tokens=self._config.seq_length_tokens,
            directory=self._writer.directory / MODEL_DIRECTORY,
            leads=self._ranks.leads,
        )
        return self._clock.exit(
            0, "finished", self._done, self._checkpoints.newest or self._start.origin
        )

    def _close_row(self) -> None:
        self._meter.close(
            self._done,
            learning_rate=self._lr,
            head_overflows=self._training.module.overflows,
            recompilations=self._graphs.recompilations,
            skipped_steps=self._controller.skipped_steps,
        )

    def _write_rows(self, *, all_of_them: bool = False) -> None:
        for row in self._meter.rows(all_of_them=all_of_them):
            self._writer.append(row)
        for found in self._meter.take_diagnoses():
            self._writer.append(found.event(self._done))

    def _evaluate(self) -> None:
        known = (
            self._training.module,
            self._validation,
            self._config,
            self._ranks,
            self._done,
        )
        with self._graphs.elsewhere():
            row = evaluate(*known, progressed=self._watch.heartbeat)
        self._evaluated_s = self._budget.evaluation_s = row.seconds
        self._writer.append(row)

    def _tell_startup(self) -> None:
        """Write the startup times once the device has finished the first step."""
        if not self._clock.is_over:
            if self._ranks.device.type == "cuda":
                torch.cuda.synchronize()
            self._clock.ended("first_step")
            self._clock.is_over = True
            self._writer.started(self._clock.startup())
