"""All configurations of a subject."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.profiles.decide.batch_split import split_global_batch
from autotune.search.configuration import Configuration
from autotune.search.decide.configuration_space import (
    configuration_space,
    fewest_changes,
    without_size,
)
from autotune.subjects.mlm.settings import micro_batch_sizes
from autotune.subjects.searched_settings import PlainSettings
from autotune.subjects.subject import Setting, Size
from testbed.simulators.explorations import LEVELS, STARTING, settings_of

VARYING = {
    "precision": ("fp32", "bf16"),
    "attention": ("auto", "sdpa"),
    "activation_checkpointing": ("none", "full"),
    "compile": (False, True),
    "layout": ("packed", "padded"),
}
GLOBAL_BATCH_SIZES = st.fixed_dictionaries(
    {"packed": st.integers(8, 300), "padded": st.integers(8, 600)}
)
RANKS = st.integers(1, 8)
LARGEST_SIZES = st.integers(1, 1000)


@settings(max_examples=25)
@given(GLOBAL_BATCH_SIZES, RANKS, LARGEST_SIZES)
def test_has_every_combination_once(global_batch_sizes, ranks, largest):
    searched = settings_of(VARYING, global_batch_sizes, ranks)
    configurations = configuration_space(searched, searched.starting, largest)
    first = configurations[0]
    assert first["micro_batch_size"] == searched.trained_size(searched.starting)
    sizes = {}
    for configuration in configurations:
        kind = without_size(searched, configuration)
        sizes.setdefault(kind, []).append(configuration["micro_batch_size"])
    assert len(sizes) == 2**5
    for kind, sizes_of_kind in sizes.items():
        expected = set(
            micro_batch_sizes(global_batch_sizes[kind["layout"]], ranks, largest)
        )
        if kind == without_size(searched, first):
            expected.add(first["micro_batch_size"])
        assert sorted(sizes_of_kind) == sorted(expected)


@settings(max_examples=25)
@given(GLOBAL_BATCH_SIZES, RANKS, LARGEST_SIZES)
def test_every_size_is_one_that_training_has(global_batch_sizes, ranks, largest):
    searched = settings_of(VARYING, global_batch_sizes, ranks)
    for choice in configuration_space(searched, searched.starting, largest):
        sequences = global_batch_sizes[choice["layout"]]
        size = choice["micro_batch_size"]
        split = split_global_batch(sequences, size, ranks)
        computed = split.gradient_accumulation_steps * size * ranks
        assert searched.trained_size(choice) == size
        assert searched.useful_share(choice) == pytest.approx(sequences / computed)


def test_too_small_batch_leaves_a_layout_out():
    searched = settings_of(VARYING, {"packed": 32, "padded": 3}, ranks=4)
    configurations = configuration_space(searched, searched.starting, 64)
    assert {choice["layout"] for choice in configurations} == {"packed"}


def test_names_are_unique():
    searched = settings_of(VARYING)
    configurations = configuration_space(searched, searched.starting, 64)
    names = [searched.words(choice) for choice in configurations]
    assert len(set(names)) == len(names)


def test_plain_settings_have_all_values():
    plain = PlainSettings(
        settings=(Setting(name="compile", values=(False, True)),),
        size=Size(name="batch_size"),
    )
    configurations = configuration_space(
        plain, {"compile": False, "batch_size": 3}, largest_size=6
    )
    assert configurations[0] == Configuration.of({"compile": False, "batch_size": 3})
    assert {dict(choice)["batch_size"] for choice in configurations} == {1, 2, 3, 4, 6}
    assert len(configurations) == 2 * 4 + 1


def test_only_required_values_change():
    fixed = {name: values[:1] for name, values in LEVELS.items()}
    varying = {"precision": ("fp32", "bf16"), "float8": ("none", "rowwise")}
    searched = settings_of(
        fixed
        | varying
        | {"compile": (False, True), "activation_checkpointing": ("none", "full")}
    )
    starting = Configuration.of(searched.starting)
    target = starting.but(
        {
            "precision": "bf16",
            "float8": "rowwise",
            "compile": True,
            "activation_checkpointing": "full",
        }
    )
    rejected = starting.but({"precision": "bf16", "float8": "rowwise"})
    assert not searched.is_possible(rejected)
    closest = fewest_changes(searched, rejected, target)
    assert closest == rejected.but({"compile": True})


def test_possible_configuration_stays():
    searched = settings_of(VARYING)
    other = STARTING.but({"precision": "bf16"})
    assert fewest_changes(searched, STARTING, other) == STARTING
