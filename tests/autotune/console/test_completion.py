from autotune.console.options import cards, models, profiles, sites
from autotune.machine.gpu_models import GPU_MODELS
from trainer.formats.presets import PRESETS


def test_completes_models_by_their_beginning():
    assert models("bert-m") == ["bert-mini"]
    assert models("") == list(PRESETS)


def test_completes_gpus_by_their_beginning():
    assert [name for name, _ in cards("")] == [
        gpu_model.key for gpu_model in GPU_MODELS
    ]
    assert dict(cards("H100-N")) == {"h100-nvl-94gb": "NVIDIA H100 NVL"}


def test_completes_profiles_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "p",
        "pyproject",
        "site",
        "profiles/a",
        "profiles/a.previous",
        "other/b",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.toml").write_text("")
    assert profiles("") == ["p.toml", "profiles/a.toml"]
    assert profiles("p") == ["p.toml", "profiles/a.toml"]
    assert profiles("profiles/") == ["profiles/a.toml"]
    assert profiles("other/") == ["other/b.toml"]
    assert profiles(f"{tmp_path}/other/b") == [f"{tmp_path}/other/b.toml"]
    assert profiles("nowhere/") == []
    assert sites("") == ["p.toml", "site.toml"]
    # The shell offers its file names.
    assert models("./config") == profiles("no") == sites("no") == []
