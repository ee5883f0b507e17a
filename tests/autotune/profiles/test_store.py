import pytest

from autotune.errors import MachineLacks
from autotune.evidence.profile import Evidence
from autotune.evidence.workers import JointChoice
from autotune.profiles import store
from autotune.profiles.toml_file import profile_to_toml
from testbed.examples.profiles import but, example_profile
from trainer.formats.errors import UnreadableFile

EXAMPLE = example_profile()


def probed_again(**train):
    """Return the example as a repeated probe writes it: without a worker sweep.

    Args:
        train: Settings that the repeated probe has, instead of the example's.
    """
    data = EXAMPLE.train.data.model_copy(update={"num_workers": 0})
    profile = but(EXAMPLE, train={"data": data} | train)
    evidence = Evidence(probe=EXAMPLE.evidence.probe)
    return profile.model_copy(update={"evidence": evidence})


@pytest.fixture
def path(workdir):
    """Return the path of a profile, which is the example."""
    return workdir / "p.toml"


def test_repeated_probe_keeps_measured_workers(path):
    kept = store.keep_workers(probed_again(), path)
    assert kept.train.data.num_workers == 1
    assert kept.evidence.workers == EXAMPLE.evidence.workers
    # The same profile is not kept a second time.
    assert store.write_profile(path, kept) is None


def test_repeated_probe_keeps_adopted_loader_settings(path):
    adopted = {"num_workers": 5, "prefetch_factor": 8, "pin_memory": False}
    data = EXAMPLE.train.data.model_copy(update=adopted)
    path.write_text(profile_to_toml(but(EXAMPLE, train={"data": data})))
    assert store.keep_workers(probed_again(), path).train.data == data


def test_other_micro_batch_loses_measured_workers(path):
    profile = store.keep_workers(probed_again(micro_batch_size=1), path)
    assert profile.evidence.workers is None


def swept_with(joint, **loader_settings):
    """Return the example with these loader settings and this joint search."""
    data = EXAMPLE.train.data.model_copy(update=loader_settings)
    workers = EXAMPLE.evidence.workers.model_copy(update={"joint": joint})
    return but(EXAMPLE, train={"data": data}, evidence={"workers": workers})


def test_settings_before_a_sweep_lack_its_choice():
    before = store.before_sweep(swept_with(None, prefetch_factor=8))
    assert before.data.num_workers == 0
    # No sweep chose it, so you did.
    assert before.data.prefetch_factor == 8


@pytest.mark.parametrize("adopted", [True, False])
def test_settings_before_a_sweep_lack_adopted_ones(adopted):
    settings = {"num_workers": 5, "prefetch_factor": 8, "pin_memory": False}
    joint = JointChoice(
        trials=3, ratio_to_workers_alone=1.1, adopted=adopted, **settings
    )
    num_workers = 5 if adopted else EXAMPLE.evidence.workers.chosen
    swept = swept_with(joint, **settings | {"num_workers": num_workers})
    kept = {} if adopted else {"prefetch_factor": 8, "pin_memory": False}
    before = EXAMPLE.train.data.model_copy(update={"num_workers": 0} | kept)
    assert store.before_sweep(swept).data == before


def test_setting_edited_since_the_sweep_stays():
    joint = JointChoice(
        trials=3,
        num_workers=5,
        prefetch_factor=8,
        pin_memory=False,
        ratio_to_workers_alone=1.1,
        adopted=True,
    )
    swept = swept_with(joint, num_workers=5, prefetch_factor=4, pin_memory=False)
    data = store.before_sweep(swept).data
    assert (data.num_workers, data.prefetch_factor, data.pin_memory) == (0, 4, True)


def test_settings_of_a_profile_without_sweep_stay():
    profile = probed_again()
    assert store.before_sweep(profile) == profile.train


def test_writing_keeps_a_different_profile(path):
    profile = probed_again(micro_batch_size=1)
    kept = store.write_profile(path, profile)
    assert store.read_profile(kept).profile == EXAMPLE
    assert store.read_profile(path).profile == profile


def test_writing_keeps_an_unreadable_file(path):
    path.write_text("mine = 1\n")
    assert store.write_profile(path, EXAMPLE).read_text() == "mine = 1\n"
    assert store.read_profile(path).profile == EXAMPLE


def test_rejects_rates_of_a_pretended_gpu(path):
    driver = '[fingerprint]\ndriver = "0.0 (nullgpu)"'
    path.write_text(path.read_text().replace("[fingerprint]", driver))
    with pytest.raises(
        MachineLacks, match="a profile's tokens/s cannot be measured on a pretended"
    ):
        store.read_profile(path)


def test_profile_without_permission_is_not_missing(path, deny_reading):
    deny_reading(path.name)
    with pytest.raises(UnreadableFile, match="Permission denied") as raised:
        store.read_profile(path)
    assert str(path) in raised.value.next_step
