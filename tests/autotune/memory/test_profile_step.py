"""Kernels of real optimizer steps, by the profiler."""

import pytest

from autotune.memory.size_probe import StepCounts, step_fields
from autotune.memory.values import KernelsRequest
from autotune.subjects.mlm.subject import MlmSubject
from autotune.trials.job_figures import KernelFigures
from autotune.trials.outcomes import Measured
from trainer.formats.manifest import SpecialIds
from trainer.formats.presets import model_settings
from trainer.formats.train_config import TrainConfig

MICRO_BATCH_SIZE = 4
SEQ_LENGTH_TOKENS = 64


@pytest.mark.system
@pytest.mark.parametrize("local_ranks", [1, 2])
def test_profile_has_the_operators_of_a_step(started_server, local_ranks):
    config = TrainConfig(
        model=model_settings("bert-mini"),
        seq_length_tokens=SEQ_LENGTH_TOKENS,
        micro_batch_size=MICRO_BATCH_SIZE,
        global_batch_size=MICRO_BATCH_SIZE * local_ranks,
    )
    subject = MlmSubject(
        config=config,
        vocab_size=512,
        special_ids=SpecialIds(pad=0, cls=1, sep=2, mask=3, unk=4),
        local_ranks=local_ranks,
    )
    fields = step_fields(
        subject,
        {"micro_batch_size": MICRO_BATCH_SIZE},
        StepCounts(warmup=1, timed=2),
        device="cpu",
        local_ranks=local_ranks,
    )
    request = KernelsRequest(**fields, memory_budget_bytes=None)
    outcome = started_server.run(request.trial(timeout_s=120, limit_s=120))
    assert isinstance(outcome, Measured), outcome
    figures = KernelFigures.of(outcome)
    seconds = [kernel.seconds for kernel in figures.kernels]
    assert seconds == sorted(seconds, reverse=True)
    calls = {kernel.name: kernel.calls for kernel in figures.kernels}
    # Forward and both gradients of the attention's output and the two layers of the
    # MLP, in each of four layers, at least.
    assert calls["aten::addmm"] + calls["aten::mm"] >= 3 * 3 * 4
    assert figures.units_per_step == MICRO_BATCH_SIZE * SEQ_LENGTH_TOKENS
