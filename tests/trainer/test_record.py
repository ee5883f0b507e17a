import json

import pytest

from trainer.errors import BadConfig
from trainer.record import EvaluationRow, RunExit, RunHeader, RunWriter, StepRow, read_run


def _header() -> RunHeader:
    return RunHeader(
        schema_version=2, name="m", started_utc="2026-01-01T00:00:00Z", config={}, sources={}, config_sha256="a",
        profile_sha256="b", dataset_hash="c", world_size=2, accumulation_steps=1, rows_per_microbatch_per_rank=4,
        global_batch_rows=8, parameters=10, layout="packed", attention="sdpa", attention_reason="asked for",
        recipe_changes=[], device="cpu", peak_flops_per_s=None, versions={},
    )  # fmt: skip


def _row(step: int) -> StepRow:
    return StepRow(
        step=step, loss=1.0, grad_norm=1.0, learning_rate=0.1, step_s=1.0, data_wait_s=0.0, compute_s=0.8,
        communication_s=None, optimizer_s=0.1, real_tokens=5, slot_tokens=8, packing_efficiency=0.625,
        real_tokens_per_s=5.0, real_tokens_per_s_per_rank=2.5, slot_tokens_per_s=8.0, slot_tokens_per_s_per_rank=4.0,
        model_flops_per_s_per_rank=1e9, mfu=None, mfu_6n=None, peak_memory_bytes=100,
        gradient_noise_scale_tokens=None, head_overflows=0, recompilations=0,
    )  # fmt: skip


def _evaluation(step: int) -> EvaluationRow:
    return EvaluationRow(
        step=step, loss=1.0, perplexity=2.7, masked_accuracy=0.5, predicted_tokens=9, rows=3, seconds=0.1
    )


def test_a_run_is_read_back_as_it_was_written(tmp_path):
    writer = RunWriter(tmp_path / "r", active=True)
    writer.start(_header())
    for step in (1, 2):
        writer.step(_row(step))
    writer.evaluation(_evaluation(2))
    end = RunExit(exit_code=0, reason="finished", steps=2, seconds=2.0, finished_utc="2026-01-01T00:00:02Z")
    writer.finish(end)
    run = read_run(tmp_path / "r")
    assert (run.header, run.steps, run.end) == (_header(), (_row(1), _row(2)), end)
    assert run.evaluations == (_evaluation(2),)


def test_a_torn_step_is_left_out(tmp_path):
    writer = RunWriter(tmp_path / "r", active=True)
    writer.start(_header())
    writer.step(_row(1))
    with (tmp_path / "r" / "steps.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    run = read_run(tmp_path / "r")
    assert run.steps == (_row(1),)
    assert run.end is None


def test_a_rank_that_does_not_lead_writes_nothing(tmp_path):
    writer = RunWriter(tmp_path / "r", active=False)
    writer.start(_header())
    writer.step(_row(1))
    assert not (tmp_path / "r").exists()


def test_what_is_no_run_or_another_version_is_refused(tmp_path):
    with pytest.raises(BadConfig, match="not a run"):
        read_run(tmp_path)
    RunWriter(tmp_path / "r", active=True).start(_header())
    path = tmp_path / "r" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 9}))
    with pytest.raises(BadConfig):
        read_run(tmp_path / "r")


def test_a_directory_that_holds_a_run_is_not_written_into(tmp_path):
    RunWriter(tmp_path / "r", active=True).start(_header())
    with pytest.raises(BadConfig, match="holds a run already"):
        RunWriter(tmp_path / "r", active=True)
