"""Tensors of the training state, under any parallel strategy: copied for a checkpoint, restored, and exported.

A tensor is stored whole or in parts along its first dimension, so a checkpoint can be
read with any number of ranks and any strategy. Under ``ddp``, rank 0 writes everything;
under ``zero1``, each rank writes the optimizer state that it owns; under ``fsdp2``,
each writes its shard of everything.
"""

import contextlib
import functools
import itertools
import json
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast

from trainer.build import Training
from trainer.checkpoint.format import CheckpointManifest, Part, TensorEntry
from trainer.data.dataset import TOKENIZER_NAME, SpecialIds
from trainer.distributed.optimizer import unwrap_optimizer
from trainer.distributed.ranks import Ranks
from trainer.errors import BadConfig
from trainer.files import DISK_BLOCK_BYTES, sync
from trainer.model.masked_lm import MaskedLM

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """Tensor of the training state as this rank holds it."""

    name: str
    local: torch.Tensor
    """This rank's part of the tensor; writing into it changes the training."""
    shape: tuple[int, ...]
    begin: int
    """Offset of ``local`` in the first dimension of the whole tensor."""
    saved_here: bool
    """True if this rank writes the part to checkpoints."""
    shared: bool
    """True if all ranks hold the same whole tensor."""

    @property
    def end(self) -> int:
        """End (exclusive) of ``local`` in the first dimension of the whole tensor.

        1 for a scalar.
        """
        return self.begin + (self.local.shape[0] if self.shape else 1)


def tensor_shards(training: Training, ranks: Ranks) -> list[TensorShard]:
    """Return weights, buffers and optimizer state, in the same order on every rank.

    Zero1 shards the state.
    """
    module, optimizer = training.module, unwrap_optimizer(training.optimizer)
    lasting = module.state_dict().keys()
    buffers = (
        (name, buffer) for name, buffer in module.named_buffers() if name in lasting
    )
    found = [
        _held(f"weights.{name}", value, ranks)
        for name, value in (*module.named_parameters(), *buffers)
    ]
    of_owner_only = optimizer is not training.optimizer
    for name, parameter in module.named_parameters():
        state = optimizer.state.get(parameter, {})
        for key in (key for key in _STATE_KEYS if key in state):
            held = _held(f"{key}.{name}", state[key], ranks)
            found.append(
                replace(held, saved_here=True, shared=False) if of_owner_only else held
            )
    return found


def _held(name: str, value: torch.Tensor, ranks: Ranks) -> TensorShard:
    if isinstance(value, DTensor):
        local, shape = value.to_local().detach(), tuple(value.shape)
        mesh = value.device_mesh
        part = mesh.get_local_rank("shard")
        # As torch.chunk along the first dimension.
        rows = (
            -(-shape[0] // mesh.size(mesh.mesh_dim_names.index("shard")))
            if mesh.mesh_dim_names
            else shape[0]
        )
        begin = min(shape[0], part * rows)
        assert local.shape[0] == min(rows, shape[0] - begin), name
        first_copy = mesh.ndim == 1 or mesh.get_local_rank("copy") == 0
        return TensorShard(
            name=name,
            local=local,
            shape=shape,
            begin=begin,
            saved_here=first_copy,
            shared=False,
        )
    value = value.detach()
    return TensorShard(
        name=name,
        local=value,
        shape=tuple(value.shape),
        begin=0,
        saved_here=ranks.leads,
        shared=True,
    )


def make_state(training: Training) -> None:
    """Create the optimizer state as its first step would, so that a checkpoint can be loaded into it."""
    optimizer = unwrap_optimizer(training.optimizer)
    for parameter in (
        one for group in optimizer.param_groups for one in group["params"]
    ):
        if not optimizer.state[parameter]:
            averages = {key: torch.zeros_like(parameter) for key in _STATE_KEYS[1:]}
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": step, **averages}


class HostCopy:
    """Host memory of a safetensors file for the tensors that this rank writes, always the same; ``pinned`` for GPUs."""

    def __init__(self, kept: Sequence[TensorShard], file: str, *, pinned: bool) -> None:
        # Widest dtypes first, so that every tensor is aligned for its dtype.
        self._order = sorted(
            range(len(kept)), key=lambda number: -kept[number].local.element_size()
        )
        ordered = [kept[number] for number in self._order]
        ends = list(itertools.accumulate(one.local.nbytes for one in ordered))
        header = {}
        self.tensors: dict[str, TensorEntry] = {}
        for one, end in zip(ordered, ends, strict=True):
            dtype = _DTYPE_NAMES[one.local.dtype]
            offsets = [end - one.local.nbytes, end]
            header[one.name] = {
                "dtype": dtype,
                "shape": list(one.local.shape),
                "data_offsets": offsets,
            }
            part = Part(file=file, begin=one.begin, end=one.end)
            self.tensors[one.name] = TensorEntry(
                dtype=dtype, shape=list(one.shape), parts=[part]
            )
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % DISK_BLOCK_BYTES)
        head = len(text).to_bytes(8, "little") + text
        size_bytes = len(head) + (ends[-1] if ends else 0)
        memory = torch.empty(
            size_bytes + DISK_BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned
        )
        begin = -memory.data_ptr() % DISK_BLOCK_BYTES  # alignment for direct I/O
        self._file = memory[begin : begin + size_bytes]
        self._file.fill_(0)  # allocates the pages now, not during the first copy
        self._file[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        room, placed = (
            self._file[len(head) :],
            zip((one.local for one in ordered), ends, strict=True),
        )
        self._views = [
            room[end - one.nbytes : end].view(one.dtype).view(one.shape)
            for one, end in placed
        ]

    def take(self, kept: Sequence[TensorShard]) -> None:
        """Copy all tensors into the buffer; from a GPU the copies are asynchronous."""
        sources = [kept[number].local for number in self._order]
        for view, source in zip(self._views, sources, strict=True):
            view.copy_(source, non_blocking=True)

    @property
    def content(self) -> memoryview:
        """Content of the safetensors file."""
        return self._file.numpy().data


def restore(
    training: Training,
    directory: Path,
    manifest: CheckpointManifest,
    ranks: Ranks,
    *,
    progressed: Callable[[], None] = lambda: None,
) -> None:
    """Load a checkpoint's tensors into a training, whatever number of ranks and strategy wrote it.

    Rank 0 reads tensors that all ranks hold, and broadcasts them. ``progressed`` is
    called before each tensor. Raises ``BadConfig`` if the checkpoint is of another
    model, or lacks a part.
    """
    make_state(training)
    held = tensor_shards(training, ranks)
    for one in held:
        entry, dtype = manifest.tensors.get(one.name), _DTYPE_NAMES[one.local.dtype]
        if entry is None or (tuple(entry.shape), entry.dtype) != (one.shape, dtype):
            there = "missing" if entry is None else f"{entry.dtype} {entry.shape}"
            what = f"{one.name} is {there}, expected {dtype} {list(one.shape)} here"
            next_step = "Resume with the profile that the run was started with."
            raise BadConfig(
                f"{directory} does not match the model: {what}", next_step=next_step
            )
    with torch.no_grad(), contextlib.ExitStack() as opened:
        open_file = functools.cache(
            lambda name: opened.enter_context(
                safe_open(directory / name, framework="pt")
            )
        )
        for one in held:
            progressed()
            if (ranks.leads or not one.shared) and not _read(
                one, manifest.tensors[one.name].parts, open_file
            ):
                next_step = "Resume from another one: --resume PATH"
                raise BadConfig(
                    f"{directory} is incomplete: it lacks a part of {one.name}",
                    next_step=next_step,
                )
            if one.shared:
                ranks.broadcast_tensor(one.local)
    training.module.weights_changed()


def _read(
    one: TensorShard, parts: Sequence[Part], open_file: Callable[[str], Any]
) -> bool:
    """Fill a tensor from the stored parts that overlap it.

    Return whether they cover all of it.
    """
    if not one.shape:
        if parts:
            one.local.copy_(open_file(parts[0].file).get_tensor(one.name))
        return bool(parts)
    done = one.begin
    for part in parts:
        begin, end = max(part.begin, one.begin), min(part.end, one.end)
        if begin == done and begin < end:
            into = one.local[begin - one.begin : end - one.begin]
            rows = open_file(part.file).get_slice(one.name)[
                begin - part.begin : end - part.begin
            ]
            if rows.shape != into.shape:
                break
            into.copy_(rows)
            done = end
    return done >= one.end


def export_model(
    module: MaskedLM,
    *,
    dataset_dir: Path,
    special_ids: SpecialIds,
    seq_length_tokens: int,
    directory: Path,
    leads: bool,
) -> None:
    """Write the model and its tokenizer in transformers' format.

    The directory appears complete or not at all.

    All ranks must call it, as each may hold a shard of the weights; rank 0 (``leads``)
    writes. Raises ``BadConfig`` if the libraries cannot write, for example on a full
    disk.
    """
    # Gathered on the host of rank 0, under transformers' names.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(module.model, options=options)
    weights = {
        name: value for name, value in found.items() if isinstance(value, torch.Tensor)
    }
    if not leads:
        return
    # By a start that was killed.
    for left in directory.parent.glob(f".{directory.name}.*.partial"):
        shutil.rmtree(left, ignore_errors=True)
    partial = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(mode=0o700, parents=True)
        _write(
            module,
            weights,
            _tokenizer(dataset_dir, special_ids, seq_length_tokens),
            partial,
        )
        before = directory.with_name(
            f".{directory.name}.{secrets.token_hex(4)}.replaced"
        )
        if directory.exists():  # a finished run that was continued
            directory.rename(before)
        partial.rename(directory)
        shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync(directory.parent)


def _write(
    module: MaskedLM,
    weights: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerFast,
    partial: Path,
) -> None:
    try:
        module.model.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(str(partial))
    except Exception as error:
        # safetensors raises no narrower exception for system errors.
        if not isinstance(error, SafetensorError) and type(error) is not Exception:
            raise
        next_step = "Free disk space and run the same command again: it only exports."
        raise BadConfig(
            f"cannot write the model to {partial.parent}: {error}", next_step=next_step
        ) from error
    for path in partial.iterdir():
        sync(path)
    sync(partial)


def _tokenizer(
    dataset_dir: Path, special_ids: SpecialIds, seq_length_tokens: int
) -> PreTrainedTokenizerFast:
    """Return the dataset's tokenizer, which adds the same special tokens as training."""
    tokenizer = Tokenizer.from_file(str(dataset_dir / TOKENIZER_NAME))
    names = {
        role: tokenizer.id_to_token(getattr(special_ids, role))
        for role in ("pad", "unk", "cls", "sep", "mask")
    }
    frame = [(names["cls"], special_ids.cls), (names["sep"], special_ids.sep)]
    single = f"{names['cls']} $A {names['sep']}"
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=frame)
    tokens = {f"{role}_token": name for role, name in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=seq_length_tokens, **tokens
    )
