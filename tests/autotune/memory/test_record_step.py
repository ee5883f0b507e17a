"""Contents of memory at the peak of real steps on a CPU."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForMaskedLM

from autotune.evidence.peak_contents import ContentKind
from autotune.memory.jobs.peak_contents import StepRecorder, record_step

CPU = torch.device("cpu")
WIDTH = 64
LAYERS = 3
BATCH_SIZE = 256
FLOAT_BYTES = 4
LAYER_PARAMETERS = WIDTH * WIDTH + WIDTH
RESULT_BYTES = FLOAT_BYTES * BATCH_SIZE * WIDTH


class Stack(nn.Module):
    """Linear layers, each with sigmoids, whose results backward needs."""

    def __init__(self, *, sigmoids=1, checkpointing=False):
        super().__init__()
        layers = []
        for _ in range(LAYERS):
            parts = [nn.Sigmoid() for _ in range(sigmoids)]
            layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), *parts))
        self.layers = nn.ModuleList(layers)
        self.checkpointing = checkpointing

    def forward(self, x):
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


@pytest.fixture(autouse=True)
def _earlier_tensors_are_gone():
    """Free what earlier tests left in cycles: it would count as inputs."""
    gc.collect()


def step_of(model, call=None, optimizer_class=torch.optim.AdamW):
    """A step that has run before, so that the optimizer has its state."""
    optimizer = optimizer_class(model.parameters())
    inputs = torch.ones(BATCH_SIZE, WIDTH)
    call = model if call is None else call

    def step():
        call(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step, optimizer


def row_of(contents, module):
    [row] = [row for row in contents.rows if row.module == module]
    return row


def test_stack_of_layers_has_known_contents():
    model = Stack()
    step, optimizer = step_of(model)
    contents = record_step(step, CPU, modules=[model], optimizers=[optimizer])
    parameter_bytes = LAYERS * FLOAT_BYTES * LAYER_PARAMETERS
    # The peak is in backward of the last linear layer. The last sigmoid's result has
    # been released; both gradients of results exist, and those of the parameters.
    assert contents.phase == "backward"
    assert contents.module == "layers.2.0"
    assert row_of(contents, "layers.*.0 (3)").bytes_by_kind == {
        ContentKind.PARAMETERS: parameter_bytes,
        ContentKind.GRADIENTS: parameter_bytes // LAYERS,
        # Two moments, and the number of steps of each tensor.
        ContentKind.OPTIMIZER_STATE: 2 * parameter_bytes + 2 * LAYERS * FLOAT_BYTES,
        ContentKind.TEMPORARIES: RESULT_BYTES,
    }
    assert row_of(contents, "layers.*.1 (3)").bytes_by_kind == {
        ContentKind.ACTIVATIONS: (LAYERS - 1) * RESULT_BYTES,
        ContentKind.TEMPORARIES: RESULT_BYTES,
    }
    assert contents.bytes_by_kind[ContentKind.INPUTS] >= RESULT_BYTES
    assert contents.not_attributed_bytes == 0
    assert contents.largest[0].size_bytes == RESULT_BYTES
    activation = next(
        part for part in contents.largest if part.kind == ContentKind.ACTIVATIONS
    )
    assert activation.operator == "sigmoid"
    assert activation.shape == [BATCH_SIZE, WIDTH]


def test_stateless_optimizer_has_no_state():
    model = Stack()
    step, optimizer = step_of(model, optimizer_class=torch.optim.SGD)
    contents = record_step(step, CPU, modules=[model], optimizers=[optimizer])
    assert ContentKind.OPTIMIZER_STATE not in contents.bytes_by_kind


def test_finds_model_and_optimizer_of_a_closure():
    model = Stack()
    step, optimizer = step_of(model)
    known = record_step(step, CPU, modules=[model], optimizers=[optimizer])
    found = record_step(step, CPU)
    for kind in (ContentKind.PARAMETERS, ContentKind.OPTIMIZER_STATE):
        # Models of other tests may still exist.
        assert found.bytes_by_kind[kind] >= known.bytes_by_kind[kind]


def test_checkpointing_keeps_the_results_of_one_layer():
    whole = Stack(sigmoids=3)
    step, optimizer = step_of(whole)
    without = record_step(step, CPU, modules=[whole], optimizers=[optimizer])
    model = Stack(sigmoids=3, checkpointing=True)
    step, optimizer = step_of(model)
    contents = record_step(step, CPU, modules=[model], optimizers=[optimizer])
    kind = ContentKind.ACTIVATIONS
    assert contents.bytes_by_kind[kind] < without.bytes_by_kind[kind]


def test_gradients_accumulate_under_their_modules():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters())
    inputs = torch.ones(BATCH_SIZE, WIDTH)

    def step():
        for _ in range(2):
            model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    contents = record_step(step, CPU, modules=[model], optimizers=[optimizer])
    linear = row_of(contents, "layers.*.0 (3)")
    gradient_bytes = LAYERS * FLOAT_BYTES * LAYER_PARAMETERS
    assert linear.bytes_of(ContentKind.GRADIENTS) == gradient_bytes


def test_compiled_model_owns_what_it_computes():
    model = Stack()
    compiled = torch.compile(model, backend="aot_eager")
    step, optimizer = step_of(model, compiled)
    contents = record_step(step, CPU, modules=[compiled], optimizers=[optimizer])
    assert contents.is_compiled
    whole = row_of(contents, "Stack")
    activation_bytes = whole.bytes_of(ContentKind.ACTIVATIONS)
    assert activation_bytes >= (LAYERS - 1) * RESULT_BYTES
    linear = row_of(contents, "layers.*.0 (3)")
    assert linear.bytes_of(ContentKind.ACTIVATIONS) == 0


def test_layers_compiled_in_place_keep_their_names():
    model = Stack()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    step, optimizer = step_of(model)
    calls_before = [layer._compiled_call_impl for layer in model.layers]
    contents = record_step(step, CPU, modules=[model], optimizers=[optimizer])
    layers = row_of(contents, "layers.* (3)")
    activation_bytes = layers.bytes_of(ContentKind.ACTIVATIONS)
    assert activation_bytes == (LAYERS - 1) * RESULT_BYTES
    assert [layer._compiled_call_impl for layer in model.layers] == calls_before


class Greedy(nn.Module):
    """Layer that requests more memory than there is."""

    def forward(self, x):
        return x.repeat(2**40, 1)


def test_out_of_memory_names_the_refused_allocation():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Greedy())
    inputs = torch.ones(BATCH_SIZE, WIDTH)
    contents = record_step(
        lambda: model(inputs).sum().backward(), CPU, modules=[model], optimizers=[]
    )
    refused = contents.refused
    assert refused.size_bytes == 2**40 * RESULT_BYTES
    assert refused.module == "1"
    assert refused.operator == "repeat"
    assert contents.phase == "forward"
    assert row_of(contents, "0").bytes_by_kind == {
        ContentKind.PARAMETERS: FLOAT_BYTES * LAYER_PARAMETERS,
        ContentKind.ACTIVATIONS: RESULT_BYTES,
    }


def test_last_step_counts():
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = StepRecorder(CPU, modules=[model], optimizers=[optimizer])
    # The first step is the larger one, and allocates the optimizer's state.
    for batch_size in (4 * BATCH_SIZE, BATCH_SIZE):
        recorder.begin_step()
        model(torch.ones(batch_size, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.end_step()
    contents = recorder.contents()
    assert contents.largest[0].size_bytes == RESULT_BYTES
    state_bytes = contents.bytes_by_kind[ContentKind.OPTIMIZER_STATE]
    assert state_bytes > 2 * LAYERS * FLOAT_BYTES * LAYER_PARAMETERS


def test_steps_may_end_in_hooks_of_an_optimizer():
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = StepRecorder(CPU, modules=[model], optimizers=[optimizer])
    recorder.begin_step()

    def ended(*_):
        recorder.end_step()
        recorder.begin_step()

    hook = optimizer.register_step_post_hook(ended)
    for _ in range(5):
        model(torch.ones(BATCH_SIZE, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hook.remove()
    recorder.end_step()
    contents = recorder.contents()
    # The last step only released gradients.
    assert contents.phase == "other"
    assert set(contents.bytes_by_kind) >= {
        ContentKind.PARAMETERS,
        ContentKind.GRADIENTS,
        ContentKind.OPTIMIZER_STATE,
    }


def test_other_errors_are_raised():
    def step():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        record_step(step, CPU)


def test_hooks_are_removed_afterwards():
    model = Stack()
    step, optimizer = step_of(model)
    record_step(step, CPU, modules=[model], optimizers=[optimizer])
    assert not nn.modules.module._has_any_global_hook()
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not torch._C._autograd._profiler_enabled()


def test_running_profiler_is_an_error():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        recorder = StepRecorder(CPU)
        with pytest.raises(RuntimeError, match="profiler"):
            recorder.begin_step()
    assert not nn.modules.module._has_any_global_hook()


def test_transformer_groups_its_layers():
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=100,
    )
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.ones(4, 16, dtype=torch.int64)

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    contents = record_step(step, CPU, modules=[model], optimizers=[optimizer])
    row = row_of(contents, "bert.encoder.layer.*.intermediate.dense (4)")
    assert row.bytes_of(ContentKind.PARAMETERS) == 4 * FLOAT_BYTES * (32 * 64 + 64)
    inputs = sum(part.bytes_of(ContentKind.INPUTS) for part in contents.rows)
    assert inputs >= ids.nbytes
