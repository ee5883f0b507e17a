"""Arguments that you give to a function that makes a library's trainer."""

import pytest

from autotune.subjects.accelerate.subject import AccelerateSubject
from autotune.subjects.jobs.given_arguments import divide_arguments
from autotune.subjects.lightning.subject import LightningSubject
from autotune.subjects.own.subject import FunctionSubject
from autotune.subjects.transformers.subject import TransformersSubject
from trainer.formats.errors import BadConfig

LIBRARIES = (TransformersSubject, LightningSubject, AccelerateSubject)


def takes_depth(depth=2): ...


def takes_anything(depth=2, **settings): ...


def takes_nothing(): ...


@pytest.mark.parametrize(
    ("make", "given", "of_function", "of_library"),
    [
        (takes_depth, {"depth": 3, "bf16": True}, {"depth": 3}, {"bf16": True}),
        (takes_depth, {}, {}, {}),
        (takes_anything, {"width": 8, "bf16": True}, {"width": 8}, {"bf16": True}),
    ],
)
def test_arguments_go_to_function_or_library(make, given, of_function, of_library):
    divided = divide_arguments(make, "m:make", given, {"bf16"}, "TrainingArguments")
    assert divided == (of_function, of_library)


def test_function_comes_before_library():
    divided = divide_arguments(takes_depth, "m:make", {"depth": 3}, {"depth"}, "T")
    assert divided == ({"depth": 3}, {})


@pytest.mark.parametrize("make", [takes_depth, takes_nothing])
def test_rejects_arguments_that_nothing_takes(make):
    with pytest.raises(
        BadConfig, match="neither m:make nor Trainer takes typo"
    ) as error:
        divide_arguments(make, "m:make", {"typo": 3}, {"bf16"}, "Trainer")
    assert "setting of Trainer" in error.value.next_step


@pytest.mark.parametrize("library", LIBRARIES)
def test_size_is_the_trainers_not_the_functions(library):
    subject = library(step_function="m:make", arguments={"micro_batch_size": 8, "n": 1})
    step = subject.step({})
    assert step.arguments["micro_batch_size"] == 8
    assert step.arguments["arguments"] == {"n": 1}
    assert subject.loader({}).arguments["micro_batch_size"] == 8
    assert subject.step({"micro_batch_size": 4}).arguments["micro_batch_size"] == 4


@pytest.mark.parametrize(
    ("library", "name"),
    [
        (TransformersSubject, "per_device_train_batch_size"),
        (LightningSubject, "batch_size"),
        (AccelerateSubject, "batch_size"),
    ],
)
def test_rejects_the_librarys_name_of_the_size(library, name):
    table = {"step_function": "m:make", "arguments": {name: 8}}
    with pytest.raises(BadConfig, match=f"autotune sets {name}") as error:
        library.from_table(table)
    assert "--set micro_batch_size=8" in error.value.next_step


def test_own_functions_get_every_argument():
    table = {"step_function": "m:build_step", "arguments": {"batch_size": 8}}
    assert FunctionSubject.from_table(table).step({}).arguments == {"batch_size": 8}
