import math
from types import SimpleNamespace

import pytest
import torch

from autotune.memory.jobs import step
from autotune.memory.values import StepRequest
from trainer.config.presets import model_settings
from trainer.config.train_config import TrainConfig


def figures_of(steps=2.0, loss=1.5):
    """Return the figures of rank 0 of two, with numbers of the other one."""
    gathered = iter((300.0, steps))
    reduced = iter(([0.1, 0.4], [9.0]))
    ranks = SimpleNamespace(
        local_world_size=2,
        all_gather_float=lambda value: [value, next(gathered)],
        all_reduce_max=lambda *values: [
            max(pair) for pair in zip(values, next(reduced), strict=True)
        ],
    )
    return step._gather_figures(
        ranks,
        SimpleNamespace(non_pytorch_bytes=7, peak_bytes=lambda: 100),
        [0.2, 0.3],
        loss,
    )


def test_figures_are_those_of_the_worst_rank():
    assert figures_of() == {
        "optimizer_steps": 2,
        "step_s": [0.2, 0.4],
        "peak_bytes": 300,
        "peak_bytes_by_rank": [100, 300],
        "non_pytorch_bytes": 9,
        "local_ranks": 2,
        "loss": 1.5,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 1.0}, "different numbers of steps"),
        ({"loss": math.nan}, "the loss is nan"),
        ({"loss": math.inf}, "the loss is inf"),
    ],
)
def test_rejects_ranks_that_disagree(changes, message):
    with pytest.raises(ValueError, match=message):
        figures_of(**changes)


class Device:
    """A device with a queue: a step takes it 0.3 s, and the host 0.1 s to launch."""

    def __init__(self):
        self.host_s = 0.0
        self.busy_until_s = 0.0
        self.unfinished = []
        self.max_unfinished = 0
        self.rehearsed = False

    def moment(self, _):
        at_s = max(self.busy_until_s, self.host_s)

        def wait():
            self.host_s = max(self.host_s, at_s)

        return SimpleNamespace(
            at_s=at_s, wait=wait, seconds_since=lambda earlier: at_s - earlier.at_s
        )

    def rehearse(self, batch):
        self.rehearsed = True

    def run(self, batches, lr):
        assert self.rehearsed
        self.host_s += 0.1
        self.unfinished = [end_s for end_s in self.unfinished if end_s > self.host_s]
        self.busy_until_s = max(self.busy_until_s, self.host_s) + 0.3
        self.unfinished.append(self.busy_until_s)
        self.max_unfinished = max(self.max_unfinished, len(self.unfinished))
        return SimpleNamespace(loss=1.5)


def test_two_steps_are_in_flight(monkeypatch):
    device = Device()
    prepared = []
    work = SimpleNamespace(step_flops=lambda lengths, predicted: 7.0)
    monkeypatch.setattr(step, "mark", device.moment)
    monkeypatch.setattr(
        step, "build_training", lambda *_: SimpleNamespace(step=device, work=work)
    )
    monkeypatch.setattr(step, "make_optimizer_state", lambda _: None)
    monkeypatch.setattr(step, "_evaluate", lambda *_: None)
    monkeypatch.setattr(
        step, "_batches", lambda *_, **__: prepared.append(1) or [batch]
    )
    batch = SimpleNamespace(tokens_N=torch.ones(1), predicted_tokens=3)
    config = TrainConfig(model=model_settings("bert-mini"), device="cuda")
    request = StepRequest.model_construct(
        config=config, vocab_size=99, special_ids=None, warmup_steps=3, timed_steps=10
    )
    ranks = SimpleNamespace(device="cuda", rank=0, all_reduce_sum=lambda _: None)
    seconds, loss, flops = step._take_steps(request, ranks)
    assert (loss, flops) == (1.5, 7.0)
    assert len(prepared) == step.PREPARED
    assert device.max_unfinished == step.IN_FLIGHT
    assert seconds[3:] == pytest.approx([0.3] * 10)
