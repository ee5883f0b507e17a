"""Subjects from options: arguments that vary are checked, and part of the subject."""

import pytest

from autotune.console.options import TunedCodeOptions
from autotune.errors import BadInput, UsageError
from autotune.subjects.bench import check_arguments
from autotune.subjects.own.subject import FunctionSubject
from autotune.subjects.requested import requested_subjects
from autotune.subjects.transformers.subject import TransformersSubject

STEP = "mine:build_step"


def requested(*vary, subject="own", arguments=None):
    options = TunedCodeOptions(step=STEP, subject=subject, arguments=arguments)
    (found,) = requested_subjects(options, vary=vary)
    return found


def test_varied_values_are_settings_and_the_first_is_present():
    subject = requested("checkpointing=false,true", "width=64,128,256")
    values = {setting.name: setting.values for setting in subject.settings()}
    assert values == {"checkpointing": (False, True), "width": (64, 128, 256)}
    assert subject.step({}).arguments == {"checkpointing": False, "width": 64}
    assert subject.step({"width": 128}).arguments["width"] == 128
    assert FunctionSubject.from_table(subject.table()) == subject


def test_varied_values_of_a_library_replace_its_own():
    subject = requested("bf16=true,false", subject="transformers")
    assert isinstance(subject, TransformersSubject)
    (bf16,) = (setting for setting in subject.settings() if setting.name == "bf16")
    assert bf16.values == (True, False)
    assert bf16.changes_rounding
    assert subject.step({}).arguments["bf16"] is True


def test_present_values_identify_the_measured_code():
    sources = {"step": "0"}
    first, other, same = (
        requested(vary) for vary in ("width=64,128", "width=128,64", "width=64,256")
    )
    assert first.identity(sources) != other.identity(sources)
    # Their trials are the same as long as nothing else was chosen.
    assert first.identity(sources) == same.identity(sources)


@pytest.mark.parametrize(
    ("vary", "arguments", "words"),
    [
        ("width", None, "is not NAME=VALUE"),
        ("width=64", None, "has one value"),
        ("width=64,64", None, "has one value"),
        ("width=64,128", ["width=32"], "cannot be used with --set width"),
    ],
)
def test_malformed_values_are_rejected(vary, arguments, words):
    with pytest.raises(UsageError, match=words):
        requested(vary, arguments=arguments)


def test_varied_arguments_must_be_parameters():
    subject = requested("depth=2,4")
    parameters = {"step": {"micro_batch_size": True, "width": False}}
    with pytest.raises(BadInput, match="takes depth"):
        check_arguments(subject, parameters)
    check_arguments(requested("width=2,4"), parameters)


def test_loader_may_take_the_size():
    subject = FunctionSubject(step_function=STEP, loader_function="mine:build_loader")
    loader = {"num_workers": True, "micro_batch_size": True}
    check_arguments(subject, {"step": {"micro_batch_size": True}, "loader": loader})
    alone = FunctionSubject(loader_function="mine:build_loader")
    with pytest.raises(BadInput, match="requires micro_batch_size"):
        check_arguments(alone, {"loader": loader})
