from autotune.search.meanings import setting_meanings
from trainer.config import TrainConfig


def test_settings_mean_what_stands_beside_them_in_the_schema():
    meanings = setting_meanings()
    assert meanings["data.loader_workers"] == "Loader processes per rank; 0 loads in the training process."
    assert meanings["max_steps"] == "Optimizer steps of the run."
    assert "\n" not in "".join(meanings.values())


def test_only_settings_have_meanings_and_most_of_them():
    meanings = setting_meanings()
    keys = {key.partition(".")[0] for key in meanings}
    assert keys <= set(TrainConfig.model_fields)
    assert len(meanings) > 50
