"""Settings of the trainer, as a run record or a trial log holds them."""

from typing import Any

from trainer.formats.errors import BadConfig
from trainer.formats.tables import parse_table
from trainer.formats.train_config import TrainConfig


def settings_of(config: dict[str, Any]) -> TrainConfig | None:
    """Return recorded settings as a configuration.

    Returns:
        None if they are invalid, as those of another version of the trainer may be.
    """
    try:
        return parse_table(TrainConfig, config, where="settings")
    except BadConfig:
        return None
