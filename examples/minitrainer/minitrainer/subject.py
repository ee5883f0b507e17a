"""``MiniTrainer`` as a subject of autotune, registered as an entry point.

    pip install .
    autotune probe --subject minitrainer --step my_program:make_trainer --memory 1GB

``make_trainer`` is a function of the user's that returns a ``MiniTrainer``.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from autotune.subjects.jobs.load import accepted, resolve
from autotune.subjects.subject import Call, Setting, Size, code_identity

HERE = "minitrainer.subject"


@dataclass(frozen=True, kw_only=True)
class MiniTrainerSubject:
    """A function of yours that returns a ``MiniTrainer``."""

    kind: ClassVar[str] = "minitrainer"

    step_function: str
    arguments: dict = field(default_factory=dict)

    @classmethod
    def from_table(cls, table):
        return cls(
            step_function=table["step_function"], arguments=table.get("arguments", {})
        )

    def table(self):
        return {"step_function": self.step_function, "arguments": self.arguments}

    @property
    def name(self):
        return self.step_function.partition(":")[0]

    @property
    def words(self):
        return self.step_function

    @property
    def size(self):
        return Size(name="batch_size", unit="samples")

    def code(self):
        return {"step": self.step_function, "loader": self.step_function}

    def identity(self, sources):
        return code_identity(self, sources)

    def settings(self):
        return (Setting(name="bf16", values=(False, True), changes_rounding=True),)

    def step(self, choice):
        return self._call("build_step", choice)

    def window_step(self, choice):
        return self.step(choice)

    def loader(self, choice):
        return self._call("build_loader", choice)

    def _call(self, function, choice):
        arguments = {"make": self.step_function, "settings": {**self.arguments}}
        return Call(function=f"{HERE}:{function}", arguments={**arguments, **choice})

    def training(self, choice):
        return None  # the step takes batches of the loader

    def untuned(self):
        arguments = {"make": self.step_function, "settings": {**self.arguments}}
        return Call(function=f"{HERE}:untuned_settings", arguments=arguments)

    def model(self, choice):
        return None

    def apply(self, choice):
        return {**self.arguments, **choice}


def build_step(make, settings, directory, **choice):
    """Return the step of the user's trainer, in a trial's process."""
    trainer = _made(make, {**settings, **choice}, directory)
    return trainer.step_function(next(iter(trainer.loader())))


def build_loader(make, settings, directory, num_workers, **choice):
    """Return the loader of the user's trainer, in a trial's process."""
    trainer = _made(make, {**settings, **choice}, directory)
    return trainer.loader(num_workers=num_workers)


def untuned_settings(make, settings, directory):
    """Return the settings of the user's trainer as it is made."""
    return {"batch_size": _made(make, settings, directory).batch_size, "num_workers": 0}


def _made(make, settings, directory):
    make_trainer = resolve(make, directory)
    return make_trainer(**accepted(make_trainer, settings))
