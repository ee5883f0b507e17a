import json
from pathlib import Path

import pytest

from benchmarks.corpora import real_lengths, write_learnable_corpus
from benchmarks.gpu.alone import steps
from benchmarks.gpu.check.children import Ended
from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.rig import NoTimeLeft, TimeBox, TrialFailed
from benchmarks.gpu.check.sizes import FULL
from benchmarks.gpu.stage import endurance
from tests.benchmarks.gpu.cards import FIXED_BYTES, ROW_BYTES, card
from tests.benchmarks.gpu.rigs import facts, make_rig
from tests.fakes import FakeClock
from trainer.presets import model_settings

FAILED = Ended(exit_code=1, cut_off=False, tail="")


def training(clock, data, *, refused_at: int | None, step_s_per_row: float):
    """The program, as if it had run."""

    def program(module, words, box):
        options = dict(zip(words[::2], words[1::2], strict=True))
        config = json.loads(Path(options["--config"]).read_text())
        wanted, step_s = int(options["--steps"]), config["micro_batch_rows"] * step_s_per_row
        steps = min(wanted, int(box.left_s / step_s))
        if refused_at is not None and refused_at < steps:
            return {"run": {"optimizer_steps": refused_at, "refused": "the allocator had to retry"}}, FAILED
        clock.sleep(steps * step_s)
        run = {"optimizer_steps": steps, "refused": "", "step_median_s": step_s, "peak_bytes": 2**30}
        return {"run": run}, Ended(exit_code=0, cut_off=steps < wanted, tail="")

    return program


def endured(tmp_path, seconds: float, total_bytes=143_771 * 2**20, *, refused_at=None, step_s_per_row=0.01):
    clock = FakeClock()
    gpu = card(clock, step_s_per_row=step_s_per_row)
    rig = make_rig(tmp_path, gpu, gpu=facts(total_bytes), sizes=FULL, clock=clock, data=tmp_path)
    rig.program = training(clock, tmp_path, refused_at=refused_at, step_s_per_row=step_s_per_row)
    sheet, error = Sheet(), None
    try:
        endurance.measure(rig, sheet, TimeBox(clock=clock, end_s=clock.monotonic_s() + seconds))
    except (NoTimeLeft, TrialFailed) as failed:
        error = failed
    return {figure.name: figure for figure in sheet.figures}, error


def test_with_time_the_largest_micro_batch_of_the_card_is_held(tmp_path):
    figures, error = endured(tmp_path, 20_000)
    assert error is None
    budget_bytes = figures["memory_budget_bytes"].value
    assert budget_bytes > 90 * 2**30
    assert figures["rows_count"].value == (budget_bytes - FIXED_BYTES) // ROW_BYTES
    assert figures["steps_without_retry_count"].value == 2_000


def test_with_little_time_the_largest_under_a_smaller_limit_is_held(tmp_path):
    figures, error = endured(tmp_path, 1_000)
    assert error is None
    budget_bytes, rows = figures["memory_budget_bytes"].value, figures["rows_count"].value
    assert budget_bytes < 40 * 2**30
    assert rows == (budget_bytes - FIXED_BYTES) // ROW_BYTES
    assert figures["steps_without_retry_count"].value == 2_000


def test_fewer_steps_than_wanted_are_no_result(tmp_path):
    figures, error = endured(tmp_path, 600, 6 * 2**30, step_s_per_row=1.0)
    assert isinstance(error, NoTimeLeft)
    assert figures["steps_without_retry_count"].label == "not measured"
    assert "went without a second try" in figures["steps_without_retry_count"].reason


def test_an_allocation_that_was_tried_twice_fails(tmp_path):
    figures, error = endured(tmp_path, 20_000, refused_at=100)
    assert isinstance(error, TrialFailed)
    assert "after 100 steps: the allocator had to retry" in str(error)
    assert figures["steps_without_retry_count"].value == 100


@pytest.mark.slow
def test_the_program_trains_and_says_how_far_it_came(tmp_path):
    data = write_learnable_corpus(tmp_path / "data", real_lengths(500, 0), real_lengths(64, 1), vocab_size=1000)
    settings = {"model": model_settings("bert-mini").model_dump(), "device": "cpu", "seq_length_tokens": 64}
    settings |= {"layout": "packed", "micro_batch_rows": 2, "global_batch_rows": 4}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    out = tmp_path / "steps.json"
    words = ["--json", str(out), "--data", str(data), "--config", str(tmp_path / "config.json")]
    assert steps.main([*words, "--steps", "6", "--budget-bytes", str(2**30)]) == 0
    run = json.loads(out.read_text())["run"]
    assert (run["optimizer_steps"], run["refused"]) == (6, "")
    assert run["peak_bytes"] > 0
