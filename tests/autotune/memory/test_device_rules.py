"""Rules of devices, compared with torch's own lists and with torch's autocast."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForMaskedLM

from autotune.memory.jobs import device_rules
from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.jobs.device_rules import DeviceKind, DeviceRules
from autotune.memory.jobs.kernels import request_rules
from autotune.memory.values import Allocation, Term
from autotune.speed.values import StepWork
from testbed.simulators.allocator import SPECIAL_IDS
from trainer.config.train_config import ModelSettings
from trainer.model.encoder import build_config

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
NAMESPACES = device_rules._NAMESPACES
OWN_NAMES = {"__matmul__", "__pow__", "cross_entropy", "norm"}
"""Names on our lists alone: two operators of Python; ``cross_entropy``, which calls a
function of the list where it cannot be seen; and ``norm``, which has a macro of its
own."""
LISTS = {
    "AT_FORALL_LOWER_PRECISION_FP": device_rules._CAST_TO_BF16,
    "AT_FORALL_FP32": device_rules._CAST_TO_FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": device_rules._FP32_RESULT,
}
"""Our lists of each device, by torch's macro that names the same functions on CUDA."""
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
META = "meta"
NO_WORK = StepWork(micro_batch_size=1, padded_tokens=1, model_flops=0.0, kernels=())
SEQUENCES = 2
HEADS = 4
POSITIONS = 256
WEIGHTS_BYTES = SEQUENCES * HEADS * POSITIONS * POSITIONS * 2
"""Attention weights in bf16: more bytes than any other block of attention takes."""


# The lists of functions.


def named_in_header(macro: str) -> set[str]:
    """Return the public functions that a macro of torch's header names."""
    definition = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", HEADER.read_text())
    assert definition is not None
    names = set()
    for name in re.findall(r"_\((\w+)", definition[1]):
        short = name.removeprefix("linalg_")
        public = short if hasattr(torch.linalg, short) else name
        if is_public_function(public):
            names.add(public)
    return names


def is_public_function(name: str) -> bool:
    has_function = any(hasattr(namespace, name) for namespace in NAMESPACES)
    return has_function and not name.startswith("_")


@pytest.mark.parametrize("macro", LISTS)
def test_cuda_lists_are_those_of_the_header(macro):
    ours = set(LISTS[macro]["cuda"].split())
    torchs = named_in_header(macro)
    # Attention has its own rule.
    assert torchs - {"scaled_dot_product_attention"} <= ours
    assert ours - torchs <= OWN_NAMES


def test_cpu_lists_are_those_of_autocast():
    torchs = set()
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU"):
            function, *_overload = name.removeprefix("aten::").split(".")
            torchs.add(function.removeprefix("linalg_"))
    ours = set()
    for names in LISTS.values():
        ours.update(names["cpu"].split())
    assert ours - torchs <= OWN_NAMES


def names_on_lists(kind: DeviceKind) -> list[str]:
    return " ".join(by_kind[kind] for by_kind in LISTS.values()).split()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_no_function_is_on_two_lists(kind):
    names = names_on_lists(kind)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_torch_has_every_listed_function(kind):
    for name in names_on_lists(kind):
        assert any(hasattr(namespace, name) for namespace in NAMESPACES), name


# The rules.


def make_rules(
    kind: DeviceKind, *, bf16: bool
) -> tuple[AllocationRecorder, DeviceRules]:
    """Return a recorder and the rules of a device, to enter together."""
    recorder = AllocationRecorder(request_rules(kind))
    return recorder, DeviceRules(kind, bf16=bf16, recorder=recorder)


def allocations_of(recorder: AllocationRecorder) -> tuple[Allocation, ...]:
    """Return the recorded allocations; the work of a step matters to none of them."""
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
    sequences, heads, positions = 1, 2, 32
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
    # The case is of use: autocast casts some results only.
    assert {dtype for _, dtype in dtypes} == {torch.bfloat16, torch.float32}
    assert gradient_dtypes(traced) == gradient_dtypes(real)


CALLS = {
    "linear": (lambda x: functional.linear(x, x), torch.bfloat16),
    "operator @": (lambda x: x @ x, torch.bfloat16),
    "einsum": (lambda x: torch.einsum("ij,jk->ik", x, x), torch.bfloat16),
    "vecdot": (lambda x: torch.linalg.vecdot(x, x), torch.bfloat16),
    "multi_dot": (lambda x: torch.linalg.multi_dot([x, x, x]), torch.bfloat16),
    "layer_norm": (lambda x: functional.layer_norm(x.bfloat16(), (4,)), torch.float32),
    "softmax": (lambda x: functional.softmax(x.bfloat16(), dim=-1), torch.float32),
    "softmax by method": (lambda x: x.bfloat16().softmax(-1), torch.float32),
    "sum": (lambda x: x.bfloat16().sum(), torch.float32),
    "sum by keyword": (lambda x: torch.sum(input=x.bfloat16()), torch.float32),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x.bfloat16()), torch.float32),
    "matrix_norm": (lambda x: torch.linalg.matrix_norm(x.bfloat16()), torch.float32),
    "operator **": (lambda x: x.bfloat16() ** 2, torch.float32),
    "gelu": (lambda x: functional.gelu(x.bfloat16()), torch.bfloat16),
    "dropout": (lambda x: functional.dropout(x.bfloat16(), 0.5), torch.bfloat16),
}
"""Calls on an fp32 matrix, with the dtype of the result under autocast on CUDA."""


@pytest.mark.parametrize(
    ("call", "dtype"), [pytest.param(*case, id=name) for name, case in CALLS.items()]
)
def test_functions_return_the_dtypes_of_autocast(call, dtype):
    recorder, rules = make_rules("cuda", bf16=True)
    with recorder, rules:
        assert call(torch.empty(4, 4, device=META)).dtype == dtype


@pytest.mark.parametrize(
    "call", [pytest.param(call, id=name) for name, (call, _) in CALLS.items()]
)
def test_rules_without_bf16_change_no_dtype(call):
    recorder, rules = make_rules("cuda", bf16=False)
    with recorder, rules:
        assert (
            call(torch.empty(4, 4, device=META)).dtype == call(torch.ones(4, 4)).dtype
        )


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
