"""What a device would do, held against torch's own lists and against torch's own
autocast."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForMaskedLM

from autotune.memory.jobs import device_rules as semantics
from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.jobs.device_rules import DeviceRules
from autotune.memory.jobs.kernels import within_kernels
from autotune.memory.values import Term
from testbed.simulators.allocator import SPECIAL_IDS
from trainer.config.train_config import ModelSettings
from trainer.model.encoder import build_config

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
HOMES = (torch, torch.Tensor, functional, torch._C._nn, torch.linalg)
ON_PURPOSE = {"__matmul__", "__pow__", "cross_entropy", "norm"}
"""Operators of Python; a function that calls one of the list where it cannot be seen;
and the macro of its own."""
LISTS = {
    "AT_FORALL_LOWER_PRECISION_FP": semantics._LOWER,
    "AT_FORALL_FP32": semantics._WIDER,
}
LISTS |= {"AT_FORALL_FP32_SET_OPT_DTYPE": semantics._WIDER_RESULT}
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def named_in_header(macro: str) -> set[str]:
    """Public functions that a macro of torch's header names, as Python calls them."""
    found = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", HEADER.read_text())
    assert found is not None
    names = set()
    for name in re.findall(r"_\((\w+)", found[1]):
        short = name.removeprefix("linalg_")
        called = short if short != name and hasattr(torch.linalg, short) else name
        if not called.startswith("_") and any(hasattr(home, called) for home in HOMES):
            names.add(called)
    return names


@pytest.mark.parametrize("macro", LISTS)
def test_our_lists_for_cuda_are_those_of_torchs_header(macro):
    ours, torchs = set(LISTS[macro]["cuda"].split()), named_in_header(macro)
    # Which has a rule of its own.
    assert torchs - {"scaled_dot_product_attention"} <= ours
    assert ours - torchs <= ON_PURPOSE


def test_everything_on_our_lists_for_a_cpu_has_a_kernel_of_torchs_autocast_there():
    operators = (
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    )
    ruled = {
        name.removeprefix("aten::").split(".")[0].removeprefix("linalg_")
        for name in operators
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU")
    }
    assert {
        name for names in LISTS.values() for name in names["cpu"].split()
    } - ruled <= ON_PURPOSE


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_no_function_is_on_two_lists(kind):
    names = [name for one in LISTS.values() for name in one[kind].split()]
    assert len(names) == len(set(names))
    assert all(any(hasattr(home, name) for home in HOMES) for name in names)


def rules(
    kind: semantics.DeviceKind, *, bf16: bool
) -> tuple[AllocationRecorder, DeviceRules]:
    recorder = AllocationRecorder(within_kernels(kind))
    return recorder, DeviceRules(kind, bf16=bf16, recorder=recorder)


def test_flash_attention_3s_backward_takes_two_numbers_and_a_head_in_fp32_for_each_position():
    rule = within_kernels("cuda", "fa3")[
        torch.ops.torch_attn._varlen_attn_backward.default
    ]
    query, edges = (
        torch.empty(1000, 12, 72, device="meta"),
        torch.arange(0, 1001, 100, dtype=torch.int32),
    )
    rows = 1664  # 1,000 and for each of 10 segments 64, in tiles of 64
    requested = [one.size_bytes for one in rule(query, query, query, edges)[1:4]]
    assert requested == [4 * 12 * rows, 4 * 12 * rows, 4 * 12 * rows * 96]


@pytest.mark.parametrize(
    ("width", "masked", "kernel"),
    [
        (64, False, "flash forward"),
        (64, True, "efficient forward"),
        (288, False, "efficient forward"),
        (26, True, None),
    ],
)
def test_attention_takes_the_kernel_that_a_gpu_has_for_its_heads(width, masked, kernel):
    recorder, of_device = rules("cuda", bf16=True)
    heads = torch.empty(1, 2, 32, width, dtype=torch.bfloat16, device="meta")
    mask = (
        torch.zeros(1, 1, 32, 32, dtype=torch.bfloat16, device="meta")
        if masked
        else None
    )
    with recorder, of_device:
        functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
    assert [one.name for one in recorder.kernels.counts if one.kind == "attention"] == (
        [kernel] if kernel else []
    )


def dtypes_of(model: nn.Module, run) -> list[tuple[str, torch.dtype]]:
    """What every module of a model returns, in the order in which they are called."""
    found: list[tuple[str, torch.dtype]] = []

    def note(name: str, _module: nn.Module, _arguments: object, result: object) -> None:
        first = result[0] if isinstance(result, tuple) else result
        if isinstance(first, torch.Tensor):
            found.append((name, first.dtype))

    for name, module in model.named_modules():
        module.register_forward_hook(partial(note, name))
    run()
    return found


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
@pytest.mark.parametrize("training", [True, False])
def test_a_models_dtypes_on_meta_are_those_of_torchs_autocast_on_a_cpu(
    family, training
):
    settings = ModelSettings(name=family, config=TINY | {"model_type": family})
    config = build_config(
        settings, vocab_size=128, special_ids=SPECIAL_IDS, seq_length_tokens=16
    )

    def step(device: str) -> nn.Module:
        with torch.device(device):
            return AutoModelForMaskedLM.from_config(config).train(training)

    def forward(model: nn.Module, device: str) -> None:
        ids_BS = torch.full((2, 16), 7, device=device)
        logits_BSV = model(input_ids=ids_BS).logits
        functional.cross_entropy(
            logits_BSV.flatten(0, 1).float(), ids_BS.flatten()
        ).backward()

    real, traced = step("cpu"), step("meta")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = dtypes_of(real, lambda: forward(real, "cpu"))
    recorder, device_rules = rules("cpu", bf16=True)
    with recorder, device_rules:
        found = dtypes_of(traced, lambda: forward(traced, "meta"))
    assert found == expected
    assert {dtype for _, dtype in found} == {torch.bfloat16, torch.float32}
    gradients = [
        (name, one.grad.dtype)
        for name, one in traced.named_parameters()
        if one.grad is not None
    ]
    assert gradients == [
        (name, one.grad.dtype)
        for name, one in real.named_parameters()
        if one.grad is not None
    ]


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
def test_functions_give_on_meta_what_cuda_gives_with_and_without_autocast(name, bf16):
    call, expected = CALLS[name]
    recorder, device_rules = rules("cuda", bf16=bf16)
    with recorder, device_rules:
        assert call(torch.empty(4, 4, device="meta")).dtype == (
            expected if bf16 else call(torch.ones(4, 4)).dtype
        )


def test_a_weight_is_cast_once_in_a_forward_and_anew_in_the_next():
    recorder, device_rules = rules("cuda", bf16=True)
    weight = nn.Parameter(torch.empty(64, 64, device="meta"))
    copy_bytes = 64 * 64 * 2

    def copies() -> int:
        made = [
            one for one in recorder.trace(1, 1).allocations if one.term == Term.COPIES
        ]
        assert all(one.size_bytes == copy_bytes for one in made)
        return len(made)

    with recorder, device_rules:
        x = torch.empty(8, 64, device="meta")
        with device_rules.autocast("meta"):
            functional.linear(x, weight)
            functional.linear(x, weight)
        assert copies() == 1
        functional.linear(x, weight)
        assert copies() == 2


def test_attention_on_a_gpu_keeps_no_weights_and_on_a_cpu_with_dropout_it_does():
    def most_bytes(kind: semantics.DeviceKind, dropout: float) -> int:
        recorder, device_rules = rules(kind, bf16=True)
        with recorder, device_rules:
            query = torch.empty(2, 4, 256, 32, device="meta", requires_grad=True)
            functional.scaled_dot_product_attention(
                query, query, query, dropout_p=dropout
            ).sum().backward()
        return max(one.size_bytes for one in recorder.trace(1, 1).allocations)

    weights_bytes = 2 * 4 * 256 * 256 * 2
    assert most_bytes("cuda", 0.1) < weights_bytes
    assert most_bytes("cpu", 0.0) < weights_bytes
    assert most_bytes("cpu", 0.1) >= weights_bytes
