"""Memory that the trainer's kernels allocate internally."""

import pytest
import torch

from autotune.memory.jobs.allocator_requests import OUTPUTS
from autotune.subjects.mlm.jobs.own_kernels import own_kernels
from trainer.model.flash_attention import ATTEND_BACKWARD


def _requests(kernel, *, positions, documents, heads, dimensions, parts):
    """Return the requests of backward in joined tensors with so many parts each."""
    rule = own_kernels().requests[ATTEND_BACKWARD]
    joined = [
        torch.empty(positions, number, heads, dimensions, device="meta").bfloat16()
        for number in parts
    ]
    result = torch.empty(positions, heads, dimensions, device="meta")
    edges = torch.empty(documents + 1, dtype=torch.int32, device="meta")
    numbers = (512, 512, -1, None)
    arguments = (result, joined, result, result, edges, edges, *numbers, kernel)
    return rule(*arguments)


@pytest.mark.parametrize(
    ("heads", "dimensions", "documents", "sizes"),
    [
        (12, 64, 300, (124_256_256, 1_941_504, 1_941_504)),
        (12, 96, 20, (15_335_424, 159_744, 159_744)),
        (8, 128, 20, (15_073_280, 117_760, 117_760)),
    ],
)
def test_fa4_backward_allocates_what_was_recorded(heads, dimensions, documents, sizes):
    # Recorded from the interface of flash-attn-4 4.0.0b36 with torch 2.14.1, by kernels
    # that do nothing: allocated in this order, and released in the same.
    outputs, *blocks = _requests(
        "fa4",
        positions=2048,
        documents=documents,
        heads=heads,
        dimensions=dimensions,
        parts=(3,),
    )
    assert outputs is OUTPUTS
    assert [block.size_bytes for block in blocks] == [*sizes, *sizes]
    assert blocks[:3] == blocks[3:]


def test_fa2_backward_keeps_parts_until_they_are_joined():
    shape = {"positions": 1024, "documents": 4, "heads": 2, "dimensions": 64}
    separate = _requests("fa2", **shape, parts=(1, 1, 1))
    joined = _requests("fa2", **shape, parts=(3,))
    part_bytes = 2 * 1024 * 2 * 64
    assert separate[0] is OUTPUTS
    assert [block.size_bytes for block in joined[:3]] == [part_bytes] * 3
    # Between, the kernel runs as it does without joining.
    assert [block.size_bytes for block in joined[3:7]] == [
        block.size_bytes for block in separate[1:]
    ]
    assert joined[7] is OUTPUTS
    assert joined[8:] == joined[:3]
