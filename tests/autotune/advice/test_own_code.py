"""Advice on training code of yours: of functions, and of a library's trainer."""

import json
from pathlib import Path

import pytest

from autotune.advice.decide.rules import advise
from autotune.advice.read_context import context_of_profile
from autotune.evidence.advice import SettingChange
from autotune.evidence.gpu_use import GpuUse
from autotune.machine.host import SystemHost
from autotune.profiles.store import StoredProfile, read_profile
from autotune.profiles.toml_file import profile_to_toml
from testbed.examples.own_profiles import own_profile
from testbed.examples.profiles import but

OWN = own_profile()
LIBRARY = OWN.model_copy(
    update={
        "subject": OWN.subject.model_copy(
            update={
                "kind": "transformers",
                "size": "micro_batch_size",
                "unit": "tokens",
                "units_per_size": 512.0,
                "table": {"step_function": "mine:make_trainer"},
            }
        ),
        "settings": {"micro_batch_size": 7, "num_workers": 1},
    }
)
UNKNOWN_KIND = OWN.model_copy(
    update={"subject": OWN.subject.model_copy(update={"kind": "not-installed"})}
)


def with_settings(profile, **settings):
    return profile.model_copy(update={"settings": {**profile.settings, **settings}})


def context_of(profile, **options):
    stored = StoredProfile(path=Path("p.toml"), profile=profile, intact=True)
    return context_of_profile(stored, (), SystemHost(), **options)


def advice_on(profile):
    """Return the advice on a profile, by the name of its rule."""
    return {advice.rule: advice for advice in advise(context_of(profile))}


def with_rows(profile, change, **sweep):
    """Return the profile with each row of its sweep changed, and the sweep itself."""
    workers = profile.evidence.workers
    rows = [row.model_copy(update=change(row)) for row in workers.rows]
    changed = workers.model_copy(update={"rows": rows, **sweep})
    return but(profile, evidence={"workers": changed})


@pytest.mark.parametrize(
    ("profile", "argument"),
    [(OWN, "num_workers"), (LIBRARY, "dataloader_num_workers")],
)
def test_starved_step_needs_more_workers(profile, argument):
    now = context_of(with_settings(profile, num_workers=0))
    assert now.bottleneck.limit == "data loading"
    advice = {one.rule: one for one in advise(now)}["more-workers"]
    assert advice.changes == (
        SettingChange(key="num_workers", old=0, new=1, argument=argument),
    )
    assert advice.safe
    assert advice.gain.known == "measured"
    assert advice.gain.ratio == pytest.approx(0.99 / 0.5)


@pytest.mark.parametrize(
    ("profile", "argument"),
    [(OWN, "batch"), (LIBRARY, "per_device_train_batch_size")],
)
def test_size_beyond_memory_is_an_error(profile, argument):
    size = profile.subject.size
    advice = advice_on(with_settings(profile, **{size: 9}))["beyond-memory"]
    assert advice.severity == "error"
    assert advice.claim.startswith(f"{size} 9 runs out of memory")
    (change,) = advice.changes
    assert (change.argument, change.new) == (argument, 7)


def test_small_size_is_below_the_knee():
    advice = advice_on(with_settings(OWN, batch=4))["below-knee"]
    assert advice.gain.ratio == pytest.approx(70 / 40)
    assert advice.evidence[0].unit == "samples/s"
    # Another size is another global batch, which changes the recipe.
    assert not advice.safe


def test_growing_throughput_is_limited_by_memory():
    advice = advice_on(OWN)["memory-limits-size"]
    assert "memory limits the batch" in advice.claim
    assert advice.gain.known == "predicted"


def test_no_count_keeps_up_with_a_slow_loader():
    slow = with_rows(
        OWN,
        lambda row: {
            "ratio_to_cached": 0.5,
            "ratio_low": 0.49,
            "ratio_high": 0.51,
            "verdict": "refuted",
            "data_wait_share": 0.5,
        },
        keeps_up=False,
    )
    advice = advice_on(slow)["slow-loader"]
    assert "the loader itself is the limit" in advice.claim
    assert "more-workers" not in advice_on(slow)


def test_idle_gpu_without_counters_is_launch_bound():
    idle = with_rows(OWN, lambda _: {"gpu": GpuUse(utilisation_share=0.5)})
    now = context_of(idle)
    assert now.bottleneck.limit == "launch-bound"
    advice = {one.rule: one for one in advise(now)}["launch-bound"]
    assert advice.changes == ()
    assert "torch.compile in your code" in advice.cost


def test_undecided_windows_are_no_certain_bottleneck():
    noisy = with_rows(OWN, lambda _: {"ratio_to_cached": 0.5, "verdict": "open"})
    assert not context_of(noisy).bottleneck.decided


def test_library_names_settings_that_were_not_varied():
    advice = advice_on(LIBRARY)["untried-settings"]
    assert "torch_compile" in advice.claim
    assert advice.command.startswith("autotune tune --step mine:")
    assert "--explore" in advice.command
    assert "untried-settings" not in advice_on(OWN)


@pytest.mark.parametrize(
    ("evidence", "part", "command"),
    [
        ({"workers": None}, "DataLoader workers", "autotune workers p.toml --loader"),
        ({"probe": None}, "largest micro-batch", "autotune probe --step mine:build"),
        ({}, "kernels", "autotune confirm p.toml"),
    ],
)
def test_names_what_cannot_be_judged(evidence, part, command):
    lacking = context_of(but(OWN, evidence=evidence)).not_judged
    (found,) = [one for one in lacking if one.part == part]
    assert found.command.startswith(command)


def test_training_loop_has_no_kernels_to_profile():
    probe = OWN.evidence.probe.model_copy(update={"trains": True})
    loop = but(OWN, evidence={"probe": probe})
    (found,) = [one for one in context_of(loop).not_judged if one.part == "kernels"]
    assert (found.command, "builds one step" in found.remedy) == (None, True)


def test_step_that_counts_no_work_is_named():
    parts = [one.part for one in context_of(OWN).not_judged]
    assert "padding and MFU" in parts


def test_kind_that_is_not_installed_keeps_its_names():
    now = context_of(with_settings(UNKNOWN_KIND, num_workers=0))
    assert any("not-installed" in one.reason for one in now.not_judged)
    advice = {one.rule: one for one in advise(now)}["more-workers"]
    assert advice.changes[0].argument == "num_workers"


@pytest.fixture
def written(workdir):
    """Write a profile with too few workers, and return its path."""
    path = workdir / "p.toml"
    path.write_text(profile_to_toml(with_settings(LIBRARY, num_workers=0)))
    return path


def test_command_shows_names_of_the_library(says, written):
    text = says("advise", written)
    assert "Bottleneck: data loading" in text
    assert "set: dataloader_num_workers = 1 (was 0), safe" in text
    assert "not judged: kernels" in text
    answer = json.loads(says("advise", written, "--json"))
    assert answer["advice"][0]["changes"][0]["argument"] == "dataloader_num_workers"
    assert answer["not_judged"]


def test_apply_writes_the_setting(says, written):
    says("advise", written, "--apply")
    advised = read_profile(written.with_suffix(".advised.toml"))
    assert advised.intact
    assert advised.profile.settings["num_workers"] == 1
    assert advised.profile.evidence.workers is not None


def test_rules_need_no_settings_of_the_bundled_trainer():
    for profile in (OWN, LIBRARY):
        for empty in ({}, {"probe": None}, {"workers": None}):
            assert advise(context_of(but(profile, evidence=empty)))
