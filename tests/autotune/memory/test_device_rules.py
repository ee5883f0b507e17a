"""Rules of devices, compared with torch's autocast and with kernels of attention."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForMaskedLM

from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.jobs.device_rules import DeviceKind, DeviceRules
from autotune.memory.jobs.kernels import request_rules
from autotune.memory.values import Allocation, Term
from autotune.speed.values import StepWork
from testbed.simulators.allocator import SPECIAL_IDS
from trainer.formats.train_config import ModelSettings
from trainer.model.encoder_config import build_config

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
META = "meta"
NO_WORK = StepWork(micro_batch_size=1, padded_tokens=1, model_flops=0.0, kernels=())
"""Work of a step that no test looks at."""
SEQUENCES = 2
HEADS = 4
POSITIONS = 256
BF16_BYTES = 2
WEIGHTS_BYTES = SEQUENCES * HEADS * POSITIONS * POSITIONS * BF16_BYTES
"""Size of the attention weights, which exceeds any other block of attention."""


def make_rules(
    kind: DeviceKind, *, bf16: bool
) -> tuple[AllocationRecorder, DeviceRules]:
    """Return a recorder and the rules of a device, to enter together."""
    recorder = AllocationRecorder(request_rules(kind))
    return recorder, DeviceRules(kind, bf16=bf16, recorder=recorder)


def allocations_of(recorder: AllocationRecorder) -> tuple[Allocation, ...]:
    """Return the recorded allocations."""
    return recorder.trace(NO_WORK, predicted_tokens=0).allocations


@pytest.mark.parametrize(
    ("head_dimensions", "masked", "kernel"),
    [
        pytest.param(64, False, "flash forward", id="usual head"),
        pytest.param(64, True, "efficient forward", id="mask"),
        # FlashAttention has heads of 256 dimensions at most.
        pytest.param(288, False, "efficient forward", id="wide head"),
        # 52 bytes in bf16; the kernel that takes a mask needs a multiple of 16.
        pytest.param(26, True, None, id="unaligned head"),
    ],
)
def test_attention_kernel_depends_on_the_head_size(head_dimensions, masked, kernel):
    recorder, rules = make_rules("cuda", bf16=True)
    sequences = 1
    heads = 2
    positions = 32
    query = torch.empty(
        sequences, heads, positions, head_dimensions, dtype=torch.bfloat16, device=META
    )
    mask = None
    if masked:
        mask = torch.zeros(
            sequences, 1, positions, positions, dtype=torch.bfloat16, device=META
        )
    with recorder, rules:
        functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    attention_kernels = [
        counted.name
        for counted in recorder.kernels.counts
        if counted.kind == "attention"
    ]
    # Attention with explicit weights is no kernel.
    expected = [] if kernel is None else [kernel]
    assert attention_kernels == expected


def result_dtypes(model: nn.Module, run) -> list[tuple[str, torch.dtype]]:
    """Return the dtype of every module's result in a run, in the order of the calls."""
    dtypes: list[tuple[str, torch.dtype]] = []

    def note_dtype(
        name: str, _module: nn.Module, _arguments: object, result: object
    ) -> None:
        first = result[0] if isinstance(result, tuple) else result
        if isinstance(first, torch.Tensor):
            dtypes.append((name, first.dtype))

    for name, module in model.named_modules():
        module.register_forward_hook(partial(note_dtype, name))
    run()
    return dtypes


def gradient_dtypes(model: nn.Module) -> list[tuple[str, torch.dtype]]:
    return [
        (name, parameter.grad.dtype)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    ]


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_dtypes_on_meta_are_those_of_autocast(family, training):
    settings = ModelSettings(name=family, config=TINY | {"model_type": family})
    config = build_config(
        settings, vocab_size=128, special_ids=SPECIAL_IDS, seq_length_tokens=16
    )

    def build(device: str) -> nn.Module:
        with torch.device(device):
            return AutoModelForMaskedLM.from_config(config).train(training)

    def step(model: nn.Module, device: str) -> None:
        ids_BS = torch.full((2, 16), 7, device=device)
        logits_BSV = model(input_ids=ids_BS).logits
        functional.cross_entropy(
            logits_BSV.flatten(0, 1).float(), ids_BS.flatten()
        ).backward()

    real = build("cpu")
    traced = build(META)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = result_dtypes(real, lambda: step(real, "cpu"))
    recorder, rules = make_rules("cpu", bf16=True)
    with recorder, rules:
        dtypes = result_dtypes(traced, lambda: step(traced, META))
    assert dtypes == expected
    # The model shows both casts, as autocast casts only some results.
    assert {dtype for _, dtype in dtypes} == {torch.bfloat16, torch.float32}
    assert gradient_dtypes(traced) == gradient_dtypes(real)


BF16_CALLS = {
    "linear": lambda matrix: functional.linear(matrix, matrix),
    "operator @": lambda matrix: matrix @ matrix,
    "einsum": lambda matrix: torch.einsum("ij,jk->ik", matrix, matrix),
    "vecdot": lambda matrix: torch.linalg.vecdot(matrix, matrix),
    "multi_dot": lambda matrix: torch.linalg.multi_dot([matrix, matrix, matrix]),
    "gelu": lambda matrix: functional.gelu(matrix.bfloat16()),
    "dropout": lambda matrix: functional.dropout(matrix.bfloat16(), 0.5),
}
"""Calls on an fp32 matrix that return bf16 under autocast on CUDA."""
FP32_CALLS = {
    "layer_norm": lambda matrix: functional.layer_norm(matrix.bfloat16(), (4,)),
    "softmax": lambda matrix: functional.softmax(matrix.bfloat16(), dim=-1),
    "softmax by method": lambda matrix: matrix.bfloat16().softmax(-1),
    "sum": lambda matrix: matrix.bfloat16().sum(),
    "sum by keyword": lambda matrix: torch.sum(input=matrix.bfloat16()),
    "vector_norm": lambda matrix: torch.linalg.vector_norm(matrix.bfloat16()),
    "matrix_norm": lambda matrix: torch.linalg.matrix_norm(matrix.bfloat16()),
    "operator **": lambda matrix: matrix.bfloat16() ** 2,
}
"""Calls on an fp32 matrix that return fp32 under autocast on CUDA."""


def dtype_under_rules(call, *, bf16: bool) -> torch.dtype:
    """Return the dtype of a call's result on CUDA."""
    recorder, rules = make_rules("cuda", bf16=bf16)
    with recorder, rules:
        result = call(torch.empty(4, 4, device=META))
    return result.dtype


@pytest.mark.parametrize("call", BF16_CALLS.values(), ids=BF16_CALLS)
def test_result_is_bf16_as_under_autocast(call):
    assert dtype_under_rules(call, bf16=True) == torch.bfloat16


@pytest.mark.parametrize("call", FP32_CALLS.values(), ids=FP32_CALLS)
def test_result_is_fp32_as_under_autocast(call):
    assert dtype_under_rules(call, bf16=True) == torch.float32


@pytest.mark.parametrize(
    "call", [*BF16_CALLS.values(), *FP32_CALLS.values()], ids=[*BF16_CALLS, *FP32_CALLS]
)
def test_rules_without_bf16_change_no_dtype(call):
    dtype_without_rules = call(torch.ones(4, 4)).dtype
    assert dtype_under_rules(call, bf16=False) == dtype_without_rules


def test_weight_is_cast_once_per_forward():
    recorder, rules = make_rules("cuda", bf16=True)
    weight = nn.Parameter(torch.empty(64, 64, device=META))
    copy = Allocation(size_bytes=64 * 64 * 2, term=Term.COPIES)

    def copies() -> list[Allocation]:
        return [
            allocation
            for allocation in allocations_of(recorder)
            if allocation.term == Term.COPIES
        ]

    with recorder, rules:
        x = torch.empty(8, 64, device=META)
        with rules.autocast(META):
            functional.linear(x, weight)
            functional.linear(x, weight)
        assert copies() == [copy]
        # As a recomputation in backward does, outside of autocast's block.
        functional.linear(x, weight)
        assert copies() == [copy, copy]


def largest_block_of_attention(kind: DeviceKind, *, dropout: float) -> int:
    """Return the bytes of the largest block of attention in bf16, backward included."""
    recorder, rules = make_rules(kind, bf16=True)
    with recorder, rules:
        query = torch.empty(
            SEQUENCES, HEADS, POSITIONS, 32, device=META, requires_grad=True
        )
        functional.scaled_dot_product_attention(
            query, query, query, dropout_p=dropout
        ).sum().backward()
    return max(allocation.size_bytes for allocation in allocations_of(recorder))


def test_attention_on_gpu_keeps_no_weights():
    assert largest_block_of_attention("cuda", dropout=0.1) < WEIGHTS_BYTES


def test_attention_on_cpu_keeps_no_weights_without_dropout():
    assert largest_block_of_attention("cpu", dropout=0.0) < WEIGHTS_BYTES


def test_attention_on_cpu_keeps_weights_with_dropout():
    # The CPU's kernel has no dropout.
    assert largest_block_of_attention("cpu", dropout=0.1) >= WEIGHTS_BYTES
