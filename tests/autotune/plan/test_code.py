"""Plans of training code of yours, in its own units."""

import json
from pathlib import Path

import pytest

from autotune.errors import BadInput, UsageError
from autotune.evidence.peak_contents import ContentKind, ModuleContents, PeakContents
from autotune.evidence.plan import Goal
from autotune.network.scaling import Assumed
from autotune.plan.inputs import plan
from autotune.plan.request import PlanRequest
from autotune.plan.sections import plan_text
from autotune.profiles.store import StoredProfile
from autotune.profiles.toml_file import profile_to_toml
from testbed.examples.own_profiles import own_profile
from testbed.examples.profiles import but

OWN = own_profile()
SAMPLES = Goal(kind="units", amount=700_000, source="--samples 700000")


def planned(profile=OWN, *, goal=SAMPLES, **options):
    stored = StoredProfile(path=Path("p.toml"), profile=profile, intact=True)
    asked = PlanRequest(source=stored, model_argument="", goal=goal, **options)
    return plan(asked, lambda *_: None)


def with_probe(**changes):
    probe = OWN.evidence.probe.model_copy(update=changes)
    return but(OWN, evidence={"probe": probe})


def test_samples_take_time_at_the_rate_with_the_loader():
    found = planned()
    # The probe has 70 samples/s; with one worker the loader keeps 99 % of it.
    assert found.rank_units_per_s.value == pytest.approx(0.99 * 70)
    assert found.rank_units_per_s.basis == "predicted"
    assert found.wall_s.value == pytest.approx(700_000 / (0.99 * 70))
    assert (found.units.value, found.units.basis) == (700_000, "given")
    assert found.steps.value == 100_000


def test_without_a_sweep_the_rate_is_measured():
    found = planned(but(OWN, evidence={"workers": None}))
    assert found.rank_units_per_s.value == pytest.approx(70)
    assert found.rank_units_per_s.basis == "measured"
    assert "without the loader" in found.rank_units_per_s.source


def test_declared_accumulation_makes_the_batch():
    accumulating = OWN.model_copy(
        update={"settings": {**OWN.settings, "gradient_accumulation_steps": 4}}
    )
    assert planned(accumulating).global_batch_size == 4 * 7
    assert "no accumulation is declared" in planned().batch_units.source


def test_memory_is_that_of_the_probe():
    between = planned().rank_bytes
    assert between.basis == "predicted"
    assert between.value == pytest.approx(5e8 + 3 / 4 * 5e8)
    largest = OWN.model_copy(update={"settings": {**OWN.settings, "batch": 8}})
    assert planned(largest).rank_bytes.basis == "measured"


def test_unknown_scaling_gives_a_lower_bound_of_time():
    found = planned(nodes=4)
    assert found.all_ranks.efficiency is None
    assert found.all_ranks.units_per_s.basis == "assumed"
    assert found.all_ranks.units_per_s.value == pytest.approx(4 * 0.99 * 70)
    assert any("lower bound" in warning for warning in found.warnings)


def test_counted_parameters_predict_scaling():
    slow = Assumed(bits_per_s=1e9)
    found = planned(with_probe(parameters=10**9), nodes=4, links=slow)
    assert found.all_ranks.efficiency.basis == "assumed"
    assert found.all_ranks.efficiency.value < 0.9
    assert found.by_nodes[0].nodes == 1
    assert not any("lower bound" in warning for warning in found.warnings)
    small = planned(with_probe(parameters=10**6), nodes=4, links=slow)
    assert small.all_ranks.efficiency.value > found.all_ranks.efficiency.value


def test_contents_of_memory_tell_the_size_of_gradients():
    contents = PeakContents(
        device="cpu",
        peak_bytes=4 * 10**9,
        phase="backward",
        module="",
        rows=[
            ModuleContents(
                module="net", bytes_by_kind={ContentKind.PARAMETERS: 4 * 10**9}
            )
        ],
    )
    slow = Assumed(bits_per_s=1e9)
    by_contents = planned(with_probe(contents=contents), nodes=4, links=slow)
    counted = planned(with_probe(parameters=10**9), nodes=4, links=slow)
    assert by_contents.all_ranks.efficiency.value == pytest.approx(
        counted.all_ranks.efficiency.value
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"goal": None}, "length of the training"),
        ({"data": Path("data")}, "has its own data"),
        ({"gpu": "h200"}, "cannot be planned"),
        ({"price_per_device_hour": 2.0}, "--price-per-gpu-hour"),
        ({"global_batch_tokens": 1e6}, "--global-batch-tokens"),
    ],
)
def test_rejects_options_without_effect(options, message):
    with pytest.raises(UsageError, match=message) as raised:
        planned(**options)
    assert raised.value.next_step


@pytest.mark.parametrize("kind", ["epochs", "flops"])
def test_goal_of_unknown_size_names_the_next_step(kind):
    goal = Goal(kind=kind, amount=3.0, source=f"--{kind} 3")
    with pytest.raises(BadInput) as raised:
        planned(goal=goal)
    assert "--samples" in raised.value.next_step


def test_no_rate_gives_no_time():
    found = planned(with_probe(curve=[]))
    assert found.wall_s is None
    assert found.rate_missing
    given = planned(with_probe(curve=[]), units_per_s=100.0)
    assert given.wall_s.value == pytest.approx(7000)


def test_text_has_the_unit_of_the_code():
    text = plan_text(planned())
    assert "samples/s of one" in text
    assert "tokens" not in text


@pytest.fixture
def path(workdir):
    written = workdir / "p.toml"
    written.write_text(profile_to_toml(OWN))
    return written


def test_command_plans_in_its_unit(says, path):
    answer = json.loads(says("plan", path, "--samples", "1M", "--json"))
    assert (answer["unit"], answer["units"]["value"]) == ("samples", 1e6)
    same = json.loads(says("plan", path, "--units", "1M", "--json"))
    assert same["wall_s"]["value"] == answer["wall_s"]["value"]
    assert "counts samples" in says("plan", path, "--tokens", "1M", code=2)
