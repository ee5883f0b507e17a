"""Varlen attention as operators of our own, and their check on a GPU."""

import ast
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from testbed.programs import FLASH_ATTENTION_4_SOURCE
from tests.trainer.reference_kernels import (
    KERNELS,
    attend,
    attend_backward,
    use_reference_kernels,
)
from trainer.formats.errors import BadConfig
from trainer.model import flash_attention, flash_attention_check
from trainer.model.flash_attention import (
    ATTEND,
    KernelFunctions,
    Segments,
    attend_joined,
    parts_of,
)
from trainer.model.flash_attention_check import check_flash_attention_4
from trainer.model.flash_attention_examples import (
    KERNELS as EXAMPLE_KERNELS,
)
from trainer.model.flash_attention_examples import (
    Differs,
    check_example,
    examples,
)
from trainer.model.varlen_kernels import VarlenKernels

EXAMPLES = {example.name: example for example in examples()}
FA4 = VarlenKernels(forward="fa4", backward="fa4")
CPU = torch.device("cpu")


def _check(example, kernels=FA4):
    check_example(example, kernels, device=CPU, dtype=torch.float64, head_dimensions=8)


def _segments(*edges: int) -> Segments:
    edges_N = torch.tensor(edges, dtype=torch.int32)
    longest = int(edges_N.diff().max())
    return Segments(
        query_edges=edges_N,
        key_edges=edges_N,
        max_query_length=longest,
        max_key_length=longest,
        window_tokens=None,
        scale=None,
    )


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("kernels", EXAMPLE_KERNELS)
def test_gradients_are_those_of_plain_attention(example, kernels, monkeypatch):
    use_reference_kernels(monkeypatch)
    # fp64, up to the log-sum-exp in fp32.
    monkeypatch.setattr("trainer.model.flash_attention_examples._TOLERANCE", 1e-6)
    _check(example, kernels)


def _scaled(*arguments):
    return [1.1 * gradient for gradient in attend_backward(*arguments)]


def _undefined(*arguments):
    gradients = attend_backward(*arguments)
    gradients[0][-1] = torch.nan
    return gradients


def _nothing_for_keys_without_queries(gradient, joined, *arguments):
    gradients = attend_backward(gradient, joined, *arguments)
    if len(joined) > 1:
        gradients[1][0] = 1.0
    return gradients


@pytest.mark.parametrize(
    "wrong", [_scaled, _undefined, _nothing_for_keys_without_queries]
)
def test_examples_find_wrong_gradients(wrong, monkeypatch):
    kernel = KernelFunctions(forward=attend, backward=wrong)
    monkeypatch.setattr(flash_attention, "KERNELS", {"fa2": kernel, "fa4": kernel})
    with pytest.raises(Differs, match="the gradient differs"):
        for example in EXAMPLES.values():
            _check(example)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_operator_keeps_its_promises(kernel, is_transposed, monkeypatch):
    use_reference_kernels(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(12, 3, 2, 8, generator=generator)
    tensors = [joined]
    if is_transposed:
        # Parts that lie head by head in memory, as rotated ones do.
        tensors = [
            torch.randn(2, 12, 8, generator=generator).transpose(0, 1).unsqueeze(1)
            for _ in range(3)
        ]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    edges = torch.tensor([0, 5, 12, 12], dtype=torch.int32)
    torch.library.opcheck(
        ATTEND, (tensors, edges, edges, 7, 7, -1, None, kernel, kernel)
    )


def test_compiled_gradients_are_those_of_eager(monkeypatch):
    use_reference_kernels(monkeypatch)
    segments = _segments(0, 5, 12, 12)
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(12, 3, 2, 8, generator=generator, requires_grad=True)

    def squares(tensor):
        return attend_joined([tensor], segments, FA4).square().sum()

    (expected,) = torch.autograd.grad(squares(joined), joined)
    compiled = torch.compile(squares, backend="aot_eager", fullgraph=True)
    (actual,) = torch.autograd.grad(compiled(joined), joined)
    assert torch.equal(actual, expected)


def test_separate_parts_are_not_copied():
    tensors = [torch.randn(12, 2, 8, requires_grad=True) for _ in range(3)]
    parts = parts_of([tensor.unsqueeze(1) for tensor in tensors])
    assert all(
        part.data_ptr() == tensor.data_ptr()
        for part, tensor in zip(parts, tensors, strict=True)
    )
    gradients = [torch.ones(12, 2, 8)] * 3
    with _CalledOperators() as called:
        torch.autograd.grad(parts, tensors, gradients)
    assert called.names <= {"aten::squeeze", "aten::unsqueeze", "aten::detach"}


class _CalledOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def interface(monkeypatch) -> SimpleNamespace:
    """Replace FlashAttention 4's functions by formulas, and return their arguments.

    The names of their parameters are those of flash-attn-4 4.0.0b36.
    """
    calls = SimpleNamespace(forward=[], backward=[])

    def segments_of(options) -> Segments:
        assert options["window_size_left"] == options["window_size_right"]
        return Segments(
            query_edges=options["cu_seqlens_q"],
            key_edges=options["cu_seqlens_k"],
            max_query_length=options["max_seqlen_q"],
            max_key_length=options["max_seqlen_k"],
            window_tokens=options["window_size_left"],
            scale=options["softmax_scale"],
        )

    def forward(q, k, v, *, return_lse, **options):
        calls.forward.append((q, k, v))
        assert return_lse
        # Five results: the last three are for sparse attention.
        return *attend(q, k, v, segments_of(options)), None, None, None

    def backward(q, k, v, out, dout, lse, *, dq, dk, dv, **options):
        calls.backward.append((dq, dk, dv))
        parts = [part.unsqueeze(1) for part in (q, k, v)]
        gradients = attend_backward(dout, parts, out, lse, segments_of(options))
        for given, gradient in zip((dq, dk, dv), gradients, strict=True):
            given.copy_(gradient[:, 0])

    module = ModuleType("interface")
    module._flash_attn_fwd = forward
    module._flash_attn_bwd = backward
    package = ModuleType("cute")
    package.interface = module
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    return calls


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_flash_attention_4_is_called_by_its_interface(example, interface):
    _check(example)
    assert len(interface.forward) == len(interface.backward) == 1


def test_flash_attention_4_reads_and_writes_parts_in_place(interface):
    joined = torch.randn(12, 3, 2, 8, requires_grad=True)
    result = attend_joined([joined], _segments(0, 5, 12), FA4)
    (gradient,) = torch.autograd.grad(result.sum(), joined)
    for part, given in zip(parts_of([joined]), interface.forward[0], strict=True):
        assert given.data_ptr() == part.data_ptr()
        assert given.stride() == (48, 8, 1)
    for part, given in zip(parts_of([gradient]), interface.backward[0], strict=True):
        assert given.data_ptr() == part.data_ptr()


def test_flash_attention_4_has_these_parameters():
    if not FLASH_ATTENTION_4_SOURCE.is_file():
        pytest.skip("make install has not fetched FlashAttention 4")
    source = ast.parse(FLASH_ATTENTION_4_SOURCE.read_text())
    parameters = {
        node.name: [
            argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)
        ]
        for node in source.body
        if isinstance(node, ast.FunctionDef)
    }
    forward = parameters["_flash_attn_fwd"]
    backward = parameters["_flash_attn_bwd"]
    options = {"softmax_scale", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q"}
    options |= {"max_seqlen_k", "window_size_left", "window_size_right"}
    assert options | {"return_lse"} <= set(forward)
    assert options | {"dq", "dk", "dv"} <= set(backward)
    assert forward[:3] == ["q", "k", "v"]
    assert backward[:6] == ["q", "k", "v", "out", "dout", "lse"]


class TestCheckOnThisMachine:
    @pytest.fixture
    def check(self, tmp_path, monkeypatch):
        """Return a function that checks with a program in place of the examples."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
        monkeypatch.setattr(flash_attention_check, "CHECK_TIMEOUT_S", 20.0)
        calls = tmp_path / "calls"

        def run(lines: str) -> int:
            program = tmp_path / "program"
            program.write_text(f"#!/bin/sh\necho called >> {calls}\n{lines}\n")
            program.chmod(0o755)
            monkeypatch.setattr(sys, "executable", str(program))
            check_flash_attention_4(torch.device("cuda"), 64)
            return len(calls.read_text().splitlines())

        return run

    def test_runs_once_on_a_machine(self, check):
        assert check("exit 0") == 1
        assert check("exit 1") == 1  # not run

    def test_names_reason_and_next_step(self, check):
        with pytest.raises(BadConfig, match="the gradient differs") as raised:
            check("echo 'Differs: the gradient differs' >&2; exit 1")
        assert raised.value.next_step == "Use --set train.attention=auto"

    def test_failure_is_checked_again(self, check):
        with pytest.raises(BadConfig):
            check("exit 1")
        assert check("exit 0") == 2

    def test_ends_example_that_hangs(self, check, monkeypatch):
        monkeypatch.setattr(flash_attention_check, "CHECK_TIMEOUT_S", 0.2)
        with pytest.raises(BadConfig, match="does not finish") as raised:
            check("exec sleep 600")
        assert raised.value.next_step == "Use --set train.attention=auto"
