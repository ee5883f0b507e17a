"""Small examples of varlen attention on a GPU, compared with plain attention.

``python -m trainer.model.flash_attention_examples cuda:0 64`` computes them with heads
of 64 dimensions, and fails if a result or gradient differs.

Shapes: T query tokens, U key tokens, N documents, P parts, H heads, E dimensions of a
head.
"""

import itertools
import sys
from dataclasses import dataclass

import torch
from torch.nn import functional

from trainer.model.flash_attention import Segments, attend_joined, parts_of
from trainer.model.varlen_kernels import VarlenKernels

_HEADS = 2
_LENGTHS = (300, 1, 128, 57, 129, 512, 130, 64)
"""Tokens of documents: shorter and longer than a kernel's tiles, and as long."""
_TOLERANCE = 0.02
"""Largest relative distance of results and gradients: bf16 has 8 bits, and kernels
round each weight to it."""
KERNELS = (
    VarlenKernels(forward="fa4", backward="fa4"),
    VarlenKernels(forward="fa2", backward="fa4"),
)
"""Kernels that are compared: backward of FlashAttention 4 after both forwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Documents for which attention is computed."""

    name: str
    query_lengths: tuple[int, ...]
    """Queries of each document."""
    key_lengths: tuple[int, ...]
    """Keys of each document."""
    window_tokens: int | None = None
    """Reach of attention to either side."""

    @property
    def has_joined_queries(self) -> bool:
        """True if queries come joined with keys and values."""
        return self.query_lengths == self.key_lengths


class Differs(Exception):
    """A result or gradient differs from that of plain attention."""


def examples() -> list[Example]:
    """Return the examples.

    Above 256 documents, FlashAttention 4 finds the document of a tile in another way.
    """
    few_empty = _LENGTHS + (0,) * 5
    many_empty = _LENGTHS + (0,) * 300
    # Every second document has no query; the others have up to 5.
    few_queries = tuple(
        min(length, 5) if number % 2 else 0 for number, length in enumerate(many_empty)
    )
    return [
        Example(name="documents", query_lengths=_LENGTHS, key_lengths=_LENGTHS),
        Example(name="empty documents", query_lengths=few_empty, key_lengths=few_empty),
        Example(
            name="many empty documents",
            query_lengths=many_empty,
            key_lengths=many_empty,
        ),
        Example(
            name="documents without queries",
            query_lengths=few_queries,
            key_lengths=many_empty,
        ),
        Example(
            name="a window",
            query_lengths=few_empty,
            key_lengths=few_empty,
            window_tokens=64,
        ),
    ]


def check_example(
    example: Example,
    kernels: VarlenKernels,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dimensions: int,
) -> None:
    """Compare result and gradients of an example with those of plain attention.

    Raises:
        Differs: If one of them differs.
    """
    generator = torch.Generator().manual_seed(0)

    def random(tokens: int, parts: int) -> torch.Tensor:
        shape = (tokens, parts, _HEADS, head_dimensions)
        values = torch.randn(shape, generator=generator)
        return values.to(device, dtype).requires_grad_()

    queries, keys = sum(example.query_lengths), sum(example.key_lengths)
    joined = [random(queries, 1), random(keys, 2)]
    if example.has_joined_queries:
        joined = [random(keys, 3)]
    segments = Segments(
        query_edges=_edges(example.query_lengths, device),
        key_edges=_edges(example.key_lengths, device),
        max_query_length=max(example.query_lengths),
        max_key_length=max(example.key_lengths),
        window_tokens=example.window_tokens,
        scale=None,
    )
    gradient_THE = random(queries, 1)[:, 0].detach()
    attended_THE = attend_joined(joined, segments, kernels)
    gradients = torch.autograd.grad(attended_THE, joined, gradient_THE)

    plain_joined = [tensor.detach().double().requires_grad_() for tensor in joined]
    plain_THE = _attend_plainly(plain_joined, example)
    plain_gradients = torch.autograd.grad(
        plain_THE, plain_joined, gradient_THE.double()
    )
    names = ["result", "gradient", "gradient"]
    for name, actual, expected in zip(
        names,
        [attended_THE, *gradients],
        [plain_THE, *plain_gradients],
        strict=False,
    ):
        distance = (actual.double() - expected).norm() / expected.norm()
        # Not ``>``, which is false for NaN.
        if not distance <= _TOLERANCE:
            raise Differs(
                f"{example.name}, {kernels.forward} forward, {kernels.backward}"
                f" backward: the {name} differs by {float(distance):.2g}"
            )


def _edges(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the edges of documents, int32, shape (N + 1,)."""
    edges = list(itertools.accumulate(lengths, initial=0))
    return torch.tensor(edges, dtype=torch.int32, device=device)


def _attend_plainly(joined: list[torch.Tensor], example: Example) -> torch.Tensor:
    """Return attention by PyTorch's own operators; shape (T, H, E)."""
    query_THE, key_UHE, value_UHE = parts_of(joined)
    per_document = zip(
        query_THE.split(list(example.query_lengths)),
        key_UHE.split(list(example.key_lengths)),
        value_UHE.split(list(example.key_lengths)),
        strict=True,
    )
    results: list[torch.Tensor] = []
    for parts in per_document:
        query, key, value = (part.transpose(0, 1) for part in parts)
        if not query.shape[1]:
            continue
        mask = None
        if example.window_tokens is not None:
            position = torch.arange(key.shape[1], device=key.device)
            distance = (position[:, None] - position).abs()
            mask = distance <= example.window_tokens
        attended = functional.scaled_dot_product_attention(query, key, value, mask)
        results.append(attended.transpose(0, 1))
    return torch.cat(results)


def main(device_name: str, head_dimensions: str) -> None:
    """Check all examples on a GPU.

    Raises:
        Differs: If a result or gradient differs.
    """
    device = torch.device(device_name)
    for kernels, example in itertools.product(KERNELS, examples()):
        check_example(
            example,
            kernels,
            device=device,
            dtype=torch.bfloat16,
            head_dimensions=int(head_dimensions),
        )
    torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(*sys.argv[1:])
