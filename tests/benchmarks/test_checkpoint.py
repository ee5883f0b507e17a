import pytest

from benchmarks.checkpoint import extra_s, make_bars, measure_stall
from benchmarks.saves import move_to_middle, write_profile
from testbed.datasets import write_dataset
from trainer.checkpoint.stored_checkpoints import list_checkpoints, read_checkpoint
from trainer.config.resolve import resolve
from trainer.data.batch_plan import make_plan
from trainer.data.dataset import TokenDataset
from trainer.loop import train
from trainer.record.writer import RunWriter
from trainer.runtime.ranks import join_ranks

STALL = {
    "block_s": {
        "none": [10.0, 20.0, 11.0],
        "synchronous": [12.0, 23.0, 12.0],
        "asynchronous": [10.1, 20.2, 11.3],
        "torch.save": [13.0, 24.0, 14.0],
    }
}
RESUME = {"start_s": [1.0, 1.2, 5.0], "middle_s": [1.5, 1.1, 1.4]}


def test_save_cost_excludes_the_step():
    assert extra_s(STALL, "synchronous") == pytest.approx(2)
    assert extra_s(STALL, "asynchronous") == pytest.approx(0.2)
    figures = {bar.name: bar.figure for bar in make_bars(STALL, RESUME)}
    assert figures["checkpoint_stall_of_synchronous_share"] == pytest.approx(0.1)
    assert figures["checkpoint_stall_of_interval_share"] == pytest.approx(0.2 / 600)
    assert figures["checkpoint_resume_middle_ratio"] == pytest.approx(1.4 / 1.2)
    assert make_bars(STALL, None)[-1].figure is None


@pytest.mark.slow
def test_measures_real_saves_interleaved(tmp_path):
    stall = measure_stall(tmp_path, "bert-mini", "cpu", 2)
    assert {len(seconds) for seconds in stall["block_s"].values()} == {2}
    assert stall["state_bytes"] > 50e6
    assert min(stall["blocked_s"]) > 0


def test_training_resumes_from_moved_checkpoint(tmp_path):
    data = write_dataset(
        tmp_path / "data",
        [[5 + number % 90] * (number % 30 + 4) for number in range(9000)],
    )
    resolved = resolve(
        write_profile(tmp_path / "resume.toml"),
        assignments=["train.max_steps=1"],
        data=data,
    )
    writer = RunWriter(tmp_path / "run")
    train(
        resolved, join_ranks(resolved.config, environment={}), writer, lambda row: None
    )
    checkpoint = list_checkpoints(tmp_path / "run" / "checkpoints")[0]
    moved = read_checkpoint(
        move_to_middle(checkpoint, data, tmp_path / "middle" / checkpoint.name)
    )
    plan = make_plan(resolved.config, len(TokenDataset.open(data)), 1)
    blocks = [lane // plan.block_samples for lane in moved.state.position.lanes]
    assert blocks == [plan.blocks_per_epoch // 2] * plan.lanes
    assert moved.state.step == 1
