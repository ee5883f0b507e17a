"""The range of a predicted size covers what other versions of torch need."""

import pytest

from autotune.memory.decide.overheads import NEWER_TORCH_SHARE, unconfirmed_share


@pytest.mark.parametrize(
    ("device", "torch", "is_compiled", "share"),
    [
        ("cuda", "2.13.0+cpu", True, NEWER_TORCH_SHARE),
        ("cuda", "3.0.1", True, NEWER_TORCH_SHARE),
        ("cuda", "2.11.0+cu130", True, 0.0),
        ("cuda", "2.13.0", False, 0.0),
        ("cpu", "2.13.0", True, 0.0),
    ],
)
def test_newer_torch_is_unconfirmed_when_compiled(device, torch, is_compiled, share):
    assert unconfirmed_share(device, torch, is_compiled=is_compiled) == share
