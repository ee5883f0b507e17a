"""Queries, keys and values that attention reads as parts of one matmul's result."""

import functools

import pytest
import torch

from tests.trainer.gradients import loss_and_gradients
from tests.trainer.masked_attention import choose_varlen
from tests.trainer.reference_kernels import KERNELS
from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.model import flash_attention, masked_lm
from trainer.model.flash_attention import KernelFunctions, parts_of
from trainer.model.varlen_kernels import VarlenKernels


def _gradients(dataset, monkeypatch, family="bert", *, joins=True, **changes):
    """Take a step in bf16 whose attention reads parts of joined results, or not.

    Returns:
        The training, and loss and gradients of the step.
    """
    choose_varlen(monkeypatch, "fa4")
    kernels = VarlenKernels(forward="fa4", backward="fa4")
    monkeypatch.setattr(masked_lm, "fastest_kernels", lambda _: kernels)
    config = config_of(family, precision="bf16", **changes)
    with pytest.MonkeyPatch.context() as building:
        if not joins:
            building.setattr(masked_lm, "keep_joined", lambda _: None)
        training = training_of(config, dataset)
    return training, loss_and_gradients(training, micro_batches(dataset, config))


@pytest.fixture
def seen(monkeypatch) -> list[tuple[int, ...]]:
    """Return the numbers of parts of the joined tensors of each backward.

    Of each, the result must be the memory that the kernel has written.
    """
    numbers: list[tuple[int, ...]] = []
    backward = KERNELS["fa4"].backward

    def recorded(gradient, joined, *arguments):
        numbers.append(tuple(tensor.shape[1] for tensor in joined))
        for tensor in joined:
            # A matmul's result, of which each part is a view.
            assert tensor.is_contiguous() or tensor.shape[1] == 1
        return backward(gradient, joined, *arguments)

    recording = KernelFunctions(forward=KERNELS["fa4"].forward, backward=recorded)
    monkeypatch.setitem(KERNELS, "fa4", recording)
    return numbers


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("last_layer", ["sparse", "dense"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_parts_give_the_same_gradients(
    family, last_layer, checkpointing, dataset, monkeypatch
):
    changes = {"last_layer": last_layer, "activation_checkpointing": checkpointing}
    _, joined = _gradients(dataset, monkeypatch, family, **changes)
    _, separate = _gradients(dataset, monkeypatch, family, joins=False, **changes)
    assert joined.loss == separate.loss
    assert joined.gradients.keys() == separate.gradients.keys()
    for name, gradient in joined.gradients.items():
        assert torch.equal(gradient, separate.gradients[name]), name


def test_compiled_layers_give_the_same_gradients(dataset, monkeypatch):
    # Graphs of forward and backward, without machine code.
    compile_graphs = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile_graphs)
    torch.compiler.reset()  # other tests have compiled layers of the same code
    training, joined = _gradients(dataset, monkeypatch, compile=True)
    torch.compiler.reset()
    _, separate = _gradients(dataset, monkeypatch, compile=True, joins=False)
    assert joined.loss == separate.loss
    for name, gradient in joined.gradients.items():
        assert torch.equal(gradient, separate.gradients[name]), name
    assert not any(
        getattr(module, "joined", []) for module in training.module.modules()
    )


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_whole_results_of_matmuls_are_read(checkpointing, seen, dataset, monkeypatch):
    _gradients(dataset, monkeypatch, activation_checkpointing=checkpointing)
    # The last layer's queries come from another matmul.
    assert set(seen) == {(3,), (1, 2)}


def test_no_joined_result_is_left(dataset, monkeypatch):
    training, _ = _gradients(dataset, monkeypatch, activation_checkpointing="full")
    for module in training.module.modules():
        assert not getattr(module, "joined", [])


def test_rotated_queries_are_not_replaced(seen, dataset, monkeypatch):
    _gradients(dataset, monkeypatch, "eurobert")
    assert set(seen) == {(1, 1, 1)}


def test_gradient_of_joined_tensor_is_written_once(monkeypatch):
    monkeypatch.setattr(flash_attention, "KERNELS", KERNELS)
    joined = torch.randn(6, 3, 2, 8)
    result = torch.randn(6, 2, 8)
    edges = torch.tensor([0, 6], dtype=torch.int32)
    numbers = (torch.randn(2, 6), edges, edges, 6, 6, -1, None, "fa4")
    (gradient,) = flash_attention.ATTEND_BACKWARD(result, [joined], result, *numbers)
    assert gradient.is_contiguous()
    addresses = [part.data_ptr() for part in parts_of([gradient])]
    bytes_per_part = 2 * 8 * gradient.element_size()
    assert [address - addresses[0] for address in addresses] == [
        0,
        bytes_per_part,
        2 * bytes_per_part,
    ]
