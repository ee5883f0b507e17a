from tests.trainer.tiny_models import config_of
from trainer.formats.recorded_settings import settings_of


def test_reads_recorded_settings_back():
    config = config_of()
    assert settings_of(config.model_dump(mode="json")) == config


def test_invalid_settings_are_none():
    config = config_of().model_dump(mode="json")
    assert settings_of(config | {"setting_of_another_version": 1}) is None
