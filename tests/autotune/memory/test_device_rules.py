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
from autotune.memory.jobs.device_rules import DeviceRules
from autotune.memory.jobs.kernels import within_kernels
from autotune.memory.values import Term
from testbed.simulators.allocator import SPECIAL_IDS
from trainer.config.train_config import ModelSettings
from trainer.model.encoder import build_config

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
NAMESPACES = (torch, torch.Tensor, functional, torch._C._nn, torch.linalg)
OWN_NAMES = {"__matmul__", "__pow__", "cross_entropy", "norm"}
"""Names on our lists alone: two operators of Python; ``cross_entropy``, which calls a
function of the list where it cannot be seen; and ``norm``, which has a macro of its
own."""
LISTS = {
    "AT_FORALL_LOWER_PRECISION_FP": device_rules._LOWER,
    "AT_FORALL_FP32": device_rules._WIDER,
    "AT_FORALL_FP32_SET_OPT_DTYPE": device_rules._WIDER_RESULT,
}
"""Our lists by device, each with torch's macro of the functions on CUDA."""
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


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
    # Attention has a rule of its own.
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


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_no_function_is_on_two_lists(kind):
    names = " ".join(by_kind[kind] for by_kind in LISTS.values()).split()
    assert len(names) == len(set(names))
    assert all(
        any(hasattr(namespace, name) for namespace in NAMESPACES) for name in names
    )


def rules(
    kind: device_rules.DeviceKind, *, bf16: bool
) -> tuple[AllocationRecorder, DeviceRules]:
    recorder = AllocationRecorder(within_kernels(kind))
    return recorder, DeviceRules(kind, bf16=bf16, recorder=recorder)


def test_memory_of_flash_attention_3_backward():
    rule = within_kernels("cuda", "fa3")[
        torch.ops.torch_attn._varlen_attn_backward.default
    ]
    query = torch.empty(1000, 12, 72, device="meta")
    edges = torch.arange(0, 1001, 100, dtype=torch.int32)
    # 1,000 and 64 for each of 10 documents, in tiles of 64.
    positions = 1664
    number_bytes = 4 * 12 * positions
    # Heads of 72 dimensions are computed as 96.
    sums_bytes = number_bytes * 96
    requested = [block.size_bytes for block in rule(query, query, query, edges)[1:4]]
    assert requested == [number_bytes, number_bytes, sums_bytes]


@pytest.mark.parametrize(
    ("width", "masked", "kernel"),
    [
        pytest.param(64, False, "flash forward", id="usual head"),
        pytest.param(64, True, "efficient forward", id="mask"),
        pytest.param(288, False, "efficient forward", id="wide head"),
        pytest.param(26, True, None, id="unaligned head"),
    ],
)
def test_attention_kernel_depends_on_the_head_size(width, masked, kernel):
    recorder, active_rules = rules("cuda", bf16=True)
    heads = torch.empty(1, 2, 32, width, dtype=torch.bfloat16, device="meta")
    mask = None
    if masked:
        mask = torch.zeros(1, 1, 32, 32, dtype=torch.bfloat16, device="meta")
    with recorder, active_rules:
        functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
    attention_kernels = [
        counted.name
        for counted in recorder.kernels.counts
        if counted.kind == "attention"
    ]
    # Attention with explicit weights is no kernel.
    expected = [] if kernel is None else [kernel]
    assert attention_kernels == expected


def dtypes_of(model: nn.Module, run) -> list[tuple[str, torch.dtype]]:
    """Return the dtype of every module's result, in the order of their calls."""
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
@pytest.mark.parametrize("training", [True, False])
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
    traced = build("meta")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = dtypes_of(real, lambda: step(real, "cpu"))
    recorder, active_rules = rules("cpu", bf16=True)
    with recorder, active_rules:
        dtypes = dtypes_of(traced, lambda: step(traced, "meta"))
    assert dtypes == expected
    assert {dtype for _, dtype in dtypes} == {torch.bfloat16, torch.float32}
    assert gradient_dtypes(traced) == gradient_dtypes(real)


# Each function with the dtype of its result under autocast to bf16 on CUDA.
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


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("bf16", [True, False])
def test_functions_return_the_dtypes_of_cuda(name, bf16):
    call, expected = CALLS[name]
    recorder, active_rules = rules("cuda", bf16=bf16)
    if not bf16:
        # Without autocast, rules change no dtype.
        expected = call(torch.ones(4, 4)).dtype
    with recorder, active_rules:
        assert call(torch.empty(4, 4, device="meta")).dtype == expected


def test_weight_is_cast_once_per_forward():
    recorder, active_rules = rules("cuda", bf16=True)
    weight = nn.Parameter(torch.empty(64, 64, device="meta"))
    copy_bytes = 64 * 64 * 2

    def copies() -> int:
        made = [
            allocation
            for allocation in recorder.trace(1, 1).allocations
            if allocation.term == Term.COPIES
        ]
        assert all(allocation.size_bytes == copy_bytes for allocation in made)
        return len(made)

    with recorder, active_rules:
        x = torch.empty(8, 64, device="meta")
        with active_rules.autocast("meta"):
            functional.linear(x, weight)
            functional.linear(x, weight)
        assert copies() == 1
        functional.linear(x, weight)
        assert copies() == 2


def test_attention_on_gpu_keeps_no_weights():
    def largest_block_bytes(kind: device_rules.DeviceKind, dropout: float) -> int:
        recorder, active_rules = rules(kind, bf16=True)
        with recorder, active_rules:
            query = torch.empty(2, 4, 256, 32, device="meta", requires_grad=True)
            functional.scaled_dot_product_attention(
                query, query, query, dropout_p=dropout
            ).sum().backward()
        return max(
            allocation.size_bytes for allocation in recorder.trace(1, 1).allocations
        )

    # 2 sequences, 4 heads, 256 positions for each of 256, in bf16.
    weights_bytes = 2 * 4 * 256 * 256 * 2
    assert largest_block_bytes("cuda", 0.1) < weights_bytes
    assert largest_block_bytes("cpu", 0.0) < weights_bytes
    assert largest_block_bytes("cpu", 0.1) >= weights_bytes
