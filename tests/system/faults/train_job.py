"""The trainer with faults, as ``FAULTS_REQUEST`` requests them, under torchrun.

The request is JSON: ``faults``, a list of ``{"kind", "step", "rank"}`` whose steps
count those of this start from 1 (0: before all ranks have met; -1: when a rank's own
part is done and it is about to wait for the others); ``pace_s``, a pause before every
step; ``notes``, a directory where every rank writes down the samples of each of its
steps and what its weights are in the end.
"""

import hashlib
import itertools
import json
import math
import os
import sys
import time
from pathlib import Path

import trainer.__main__
from trainer.rank_job import RankJob

FACTORS = {"nan": math.nan, "nan_for_ever": math.nan, "spike": 20.0}


def hang_here() -> None:
    time.sleep(3600)


def raise_here() -> None:
    raise ValueError("broken on purpose")


ACTIONS = {
    "hang": hang_here,
    "raise": raise_here,
    "kill": lambda: os.kill(os.getpid(), 9),
}


class Disturbed:
    """Optimizer steps of this process with faults in between."""

    def __init__(self, request: dict, rank: int) -> None:
        self._faults = [fault for fault in request["faults"] if fault["rank"] == rank]
        self._pace_s = request["pace_s"]
        self._taken = 0
        self.module = None

    def install(self) -> None:
        from trainer.distributed.step import TrainStep

        self._run = TrainStep.run
        TrainStep.run = lambda *args, **kwargs: self._step(*args, **kwargs)  # noqa: PLW0108 - it binds the step

    def _step(self, step, *args, **kwargs):
        self._taken += 1
        self.module = step._module
        time.sleep(self._pace_s)
        self.do(self._taken)
        factor = 1.0
        for fault in self._faults:
            lasts = fault["kind"] == "nan_for_ever" and fault["step"] < self._taken
            if fault["kind"] in FACTORS and (fault["step"] == self._taken or lasts):
                factor = FACTORS[fault["kind"]]
        if factor == 1:
            return self._run(step, *args, **kwargs)
        hook = self.module.register_forward_hook(
            lambda module, inputs, loss: loss * factor
        )
        try:
            return self._run(step, *args, **kwargs)
        finally:
            hook.remove()

    def do(self, step: int) -> None:
        for fault in self._faults:
            if fault["step"] == step and fault["kind"] in ACTIONS:
                ACTIONS[fault["kind"]]()

    def weights_sha256(self) -> str:
        from torch.distributed.tensor import DTensor

        digest = hashlib.sha256()
        for parameter in self.module.parameters():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            digest.update(own.detach().cpu().numpy().tobytes())
        return digest.hexdigest()


def note_samples(file: Path) -> None:
    """Write a line for each step: its number, and epoch and number of every sample."""
    from trainer.data.loader import MicroBatchLoader
    from trainer.health.controller import HealthController

    next_step = MicroBatchLoader.next_step
    add = HealthController.add
    pairs: list[list[int]] = []

    def next_step_and_note(loader, take):
        loader._upcoming_plans, plans = itertools.tee(loader._upcoming_plans)

        def take_and_note(batches, count):
            taken_batches = take(batches, count)
            for plan in itertools.islice(plans, len(taken_batches)):
                pairs.extend(
                    zip(
                        plan.segments.epochs.tolist(),
                        plan.segments.samples.tolist(),
                        strict=True,
                    )
                )
            return taken_batches

        return next_step(loader, take_and_note)

    def add_and_write(controller, step, result, samples):
        with file.open("a") as notes:
            notes.write(json.dumps([step, pairs]) + "\n")
        pairs.clear()
        add(controller, step, result, samples)

    MicroBatchLoader.next_step = next_step_and_note
    HealthController.add = add_and_write


def main() -> int:
    request = json.loads(os.environ["FAULTS_REQUEST"])
    rank = int(os.environ["RANK"])
    notes = Path(request["notes"])
    for fault in request["faults"]:
        if fault["kind"] == "no_local_disk" and fault["rank"] == rank:
            os.environ.pop("LOCAL_DISK", None)
    disturbed = Disturbed(request, rank)
    prepare = RankJob.prepare
    leave_together = RankJob._leave_together

    def prepare_and_install(job) -> None:
        # After the trainer's own imports, so that a start is as usual.
        prepare(job)
        disturbed.install()
        note_samples(notes / f"samples-{rank}.jsonl")

    def disturb_and_leave(*args):
        disturbed.do(-1)
        return leave_together(*args)

    RankJob.prepare = prepare_and_install
    RankJob._leave_together = disturb_and_leave
    exit_code = trainer.__main__.main()
    if disturbed.module is not None:
        (notes / f"weights-{rank}.txt").write_text(disturbed.weights_sha256())
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
