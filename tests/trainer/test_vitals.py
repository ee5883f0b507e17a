import math
from types import SimpleNamespace

import torch

from trainer.overseer import VitalsQueue
from trainer.step import StepResult
from trainer.stopwatch import Mark

NOW = Mark(0.0)


def result_of(loss=2.0, norm=1.0, applied=True, told=()):
    return StepResult(
        loss=torch.tensor(loss, dtype=torch.float64), grad_norm=torch.tensor(norm), applied=torch.tensor(applied),
        told=torch.tensor(told, dtype=torch.float64), partial=None, began=NOW, asked=NOW, counted=NOW, departed=None,
        reduced=NOW, updated=NOW,
    )  # fmt: skip


def test_on_a_cpu_every_step_has_arrived_in_order_and_once():
    queue = VitalsQueue(torch.device("cpu"))
    queue.add(1, result_of(2.0, told=(1.0, 15.0)))
    queue.add(2, result_of(math.nan, math.inf, applied=False))
    first, second = queue.arrived()
    assert (first.vitals.step, first.vitals.loss, first.vitals.applied, first.told) == (1, 2.0, True, [1.0, 15.0])
    assert math.isnan(second.vitals.loss)
    assert (second.vitals.grad_norm, second.vitals.applied, second.told) == (math.inf, False, [])
    assert list(queue.arrived(all_of_them=True)) == []


def test_numbers_are_those_of_the_moment_and_in_double_precision():
    queue, result = VitalsQueue(torch.device("cpu")), result_of(1 + 2**-50)
    queue.add(1, result)
    result.loss.zero_()
    (one,) = queue.arrived()
    assert one.vitals.loss == 1 + 2**-50


def read_late(monkeypatch):
    """Let numbers be read as late on a CPU as on a GPU."""
    begin = VitalsQueue.__init__

    def begin_as_on_a_gpu(queue, _):
        begin(queue, SimpleNamespace(type="cuda"))

    monkeypatch.setattr(VitalsQueue, "__init__", begin_as_on_a_gpu)
    monkeypatch.setattr("trainer.overseer.mark", lambda _: NOW)


def test_on_a_gpu_numbers_are_read_two_steps_later_and_the_last_ones_when_they_are_asked_for(monkeypatch):
    read_late(monkeypatch)
    queue, read = VitalsQueue(torch.device("cpu")), []
    for step in range(1, 5):
        queue.add(step, result_of(float(step)))
        read.append([one.vitals.step for one in queue.arrived()])
    assert read == [[], [], [1], [2]]
    assert [(one.vitals.step, one.vitals.loss) for one in queue.arrived(all_of_them=True)] == [(3, 3.0), (4, 4.0)]
    assert list(queue.arrived(all_of_them=True)) == []


def test_steps_that_are_undone_are_not_read():
    queue = VitalsQueue(torch.device("cpu"))
    queue.add(1, result_of())
    queue.forget()
    queue.add(1, result_of(3.0))
    assert [one.vitals.loss for one in queue.arrived()] == [3.0]
