import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.plan import PlanFigure
from autotune.decide.plan import EXPORTED_BYTES_PER_PARAMETER, disk_of
from tests.trainer.checkpoints import state_of
from tests.trainer.oracles import SHAPES, config_of, training_of
from trainer.checkpoint import CHECKPOINTS_DIRECTORY, list_checkpoints, prune
from trainer.config import CheckpointSettings, ModelSettings
from trainer.dataset import TokenDataset
from trainer.keeper import Keeper
from trainer.parallel import join_ranks


def parameters(count):
    return PlanFigure(value=count, basis="measured", source="counted")


def planned(count, settings, steps):
    """Bytes of one checkpoint, how many stay at the end, and bytes on the disk at most."""
    one, disk = disk_of(parameters(count), settings, steps)
    at_once = (disk.value - EXPORTED_BYTES_PER_PARAMETER * count) / one.value
    return one.value, max(0, at_once - 2), disk.value


def bytes_in(directory):
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def test_a_real_checkpoint_is_as_large_as_planned_and_no_more_stay_than_planned(
    patterned_dataset, tmp_path, monkeypatch
):
    shape = SHAPES["bert"] | {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 512}
    settings = CheckpointSettings(keep_last=2, keep_every_steps=4, asynchronous=False)
    config = config_of(model=ModelSettings(name="m", config=shape), checkpoint=settings)
    training = training_of(config, TokenDataset.open(patterned_dataset))
    ranks, root = join_ranks(config, environment={}), tmp_path / CHECKPOINTS_DIRECTORY
    keeper = Keeper(tmp_path, config, training, ranks, attempt=1, tell_event=lambda event: None)
    at_once = []

    def watched(*arguments, **options):
        at_once.append(bytes_in(root))  # the new one is there, and the oldest still is
        return prune(*arguments, **options)

    monkeypatch.setattr("trainer.keeper.prune", watched)
    for step in range(1, 9):
        keeper.save(state_of(step), rollbacks=0)
    (newest, *_) = checkpoints = list_checkpoints(root)
    size = bytes_in(newest)
    one, kept, disk = planned(training.work.parameters, settings, steps=8)
    assert one == pytest.approx(size, rel=0.05)
    assert one < size
    assert len(checkpoints) <= kept == 2 + 2
    assert max(at_once) > 3 * size
    _, _, early = planned(training.work.parameters, CheckpointSettings(keep_last=2), steps=8)
    assert max(at_once[:3]) == pytest.approx(3 * size, rel=0.01)
    assert max(at_once[:3]) <= early
    assert max(at_once) <= disk


@given(st.integers(1, 10**6), st.integers(1, 9), st.integers(1, 10**5))
def test_what_is_kept_grows_with_the_steps_and_with_what_is_asked_for(steps, keep_last, every):
    one, plain, disk = planned(10**8, CheckpointSettings(keep_last=keep_last), steps)
    _, more, larger = planned(10**8, CheckpointSettings(keep_last=keep_last, keep_every_steps=every), steps)
    assert more - plain == steps // every
    assert larger >= disk > plain * one


def test_without_checkpoints_the_model_stays():
    _, kept, disk = planned(1000, CheckpointSettings(enabled=False), 10)
    assert (kept, disk) == (0, 4000)


def test_bytes_are_predicted_from_what_was_counted_and_assumed_from_what_was_assumed():
    assert disk_of(parameters(10), CheckpointSettings(), 1)[0].basis == "predicted"
    assumed = PlanFigure(value=10, basis="assumed", source="a vocabulary")
    assert disk_of(assumed, CheckpointSettings(), 1)[1].basis == "assumed"
