"""Settings of the loader of a Lightning module, whose only attribute is of workers."""

import inspect
import sys

import pytest
from torch.utils.data import DataLoader

from autotune.subjects.lightning import jobs

MODULE = """
import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader

MADE = []


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.batch_size, self.num_workers = 2, 0

    def train_dataloader(self):
        MADE.append(
            DataLoader(
                torch.ones(64, 4),
                batch_size=self.batch_size,
                num_workers=self.num_workers,
            )
        )
        return MADE[-1]

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_module():
    return Module(), None, {"max_steps": 1}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return the arguments of a build by the module's function."""
    (tmp_path / "small_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "small_module", raising=False)
    return {
        "build": "small_module:make_module",
        "arguments": {},
        "directory": str(tmp_path),
    }


def settings_of(loader: DataLoader) -> tuple[int, int | None, bool]:
    return loader.num_workers, loader.prefetch_factor, loader.pin_memory


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"num_workers": 2, "prefetch_factor": 6, "pin_memory": True}, (2, 6, True)),
        ({"num_workers": 2}, (2, 2, False)),
        ({"num_workers": 0, "prefetch_factor": 6}, (0, None, False)),
    ],
    ids=["all", "workers", "no workers"],
)
def test_loader_has_the_settings(place, given, expected):
    loader = jobs.build_loader(**place, **given, micro_batch_size=8)
    assert settings_of(loader) == expected
    assert loader.batch_size == 8
    # Other loaders are as they were.
    assert DataLoader([1], num_workers=1).prefetch_factor == 2


def test_workers_given_by_position_prefetch(monkeypatch):
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)
    restore = jobs._override_loaders(1, 5, None)
    # The sixth argument is the number of workers.
    with_workers = DataLoader([1], 1, False, None, None, 1)
    assert with_workers.prefetch_factor == 5
    restore()


def test_own_loop_trains_with_the_settings(place, monkeypatch):
    # It is replaced until the process ends.
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)
    train = jobs.build_training(
        **place,
        device="cpu",
        micro_batch_size=4,
        num_workers=1,
        prefetch_factor=5,
        pin_memory=False,
    )
    train()
    # Lightning reads it to make the loader of a rank.
    assert "dataset" in inspect.signature(DataLoader.__init__).parameters
    assert DataLoader([1]).prefetch_factor is None
    (loader,) = sys.modules["small_module"].MADE
    assert settings_of(loader) == (1, 5, False)
    assert loader.batch_size == 4
