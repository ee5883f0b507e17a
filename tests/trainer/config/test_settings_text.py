"""Settings as the trainer prints them at its start."""

from pathlib import Path

from trainer.config.resolve import resolve
from trainer.config.settings_text import settings_text


def test_settings_text_names_differences_with_their_source(profile):
    assignments = ["train.seed=3", "train.model.config.hidden_dropout_prob=0.0"]
    resolved = resolve(profile, assignments=assignments, data=Path("d"))
    headline, *lines = settings_text(resolved, Path("r")).splitlines()
    assert (
        headline == "train: settings that differ from the defaults; r has all of them"
    )
    assert {
        "  train.seed = 3  (command line)",
        "  train.data.path = d  (command line)",
        "  train.model.config.hidden_dropout_prob = 0.0  (command line)",
    } <= set(lines)


def test_settings_text_leaves_out_defaults(profile):
    default_max_steps = "train.max_steps=1000"
    assignments = [default_max_steps, "train.model.config.hidden_dropout_prob=0.0"]
    resolved = resolve(profile, assignments=assignments, data=Path("d"))
    text = settings_text(resolved, Path("r"))
    assert "max_steps" not in text
    assert "(default)" not in text
    # The config of the model is printed by its keys, not as a whole.
    assert "model.config =" not in text
