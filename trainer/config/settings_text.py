"""Text of the settings that a run prints at its start. No torch here."""

from pathlib import Path

from trainer.config.resolve import ResolvedConfig
from trainer.formats.train_config import TrainConfig, flatten_settings


def settings_text(resolved: ResolvedConfig, record: Path) -> str:
    """Return every setting that differs from its default, with its source, as lines.

    Args:
        resolved: Configuration of the run.
        record: File of the run record that has all settings.
    """
    model = resolved.config.model
    defaults = flatten_settings(
        TrainConfig(model=model).model_dump(mode="json"), "train."
    )
    defaults["train.model.name"] = None  # the model is always printed
    values = flatten_settings(resolved.config.model_dump(mode="json"), "train.")
    values["train.data.path"] = str(resolved.data_dir)
    # Keys of the model's config are among the sources if the command line sets them.
    values |= flatten_settings(model.config, "train.model.config.")
    text = f"train: settings that differ from the defaults; {record} has all of them\n"
    for key, source in sorted(resolved.sources.items()):
        if values.get(key) != defaults.get(key):
            text += f"  {key} = {values.get(key)}  ({source})\n"
    return text
