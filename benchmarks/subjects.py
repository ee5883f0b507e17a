"""Training code of others, as ``benchmarks.own_code`` probes it.

There are three examples of libraries, and five plain loops. Each subject has a step for
autotune, and the same model, batch and loss for tools that bring their loop.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

EXAMPLES = Path(__file__).parents[1] / "examples"
WIDTH, WORDS = 96, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One training program."""

    step: str
    """Its ``build_step``, as ``--step`` names it."""
    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    """Function from the batch size to a batch on the CPU."""
    loss: Callable[[nn.Module, Any], torch.Tensor]
    memory_bytes: int


def build_step(micro_batch_size: int, device: str, kind: str) -> Callable[[], None]:
    """Return a step of a plain loop."""
    if device == "cuda":
        torch.backends.cudnn.enabled = False  # a pretended GPU has none
    model, batch, loss = PLAIN[kind]
    module = model().to(device)
    optimizer = torch.optim.AdamW(module.parameters())
    inputs = _to(batch(micro_batch_size), device)

    def step() -> None:
        loss(module, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def example_step(
    micro_batch_size: int, device: str, example: str
) -> Callable[[], None]:
    """Return the step of one of the examples."""
    if device == "cuda":
        torch.backends.cudnn.enabled = False
    step: Callable[[], None] = _example(example).build_step(micro_batch_size, device)
    return step


def _example(name: str) -> Any:
    import importlib

    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def _to(batch: Any, device: str) -> Any:
    return (
        {name: value.to(device) for name, value in batch.items()}
        if isinstance(batch, dict)
        else batch.to(device)
    )


class Recurrent(nn.Module):
    """An LSTM over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = (
            nn.Embedding(WORDS, WIDTH),
            nn.LSTM(WIDTH, WIDTH, 2, batch_first=True),
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next word."""
        logits: torch.Tensor = self.head(self.cells(self.words(ids))[0])
        return logits


class Decoder(nn.Module):
    """A causal transformer over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers, self.head = (
            nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next word."""
        mask = nn.Transformer.generate_square_subsequent_mask(
            ids.shape[1], device=ids.device
        )
        logits: torch.Tensor = self.head(
            self.layers(self.words(ids), mask=mask, is_causal=True)
        )
        return logits


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 1024),
        nn.GELU(),
        nn.Linear(1024, 1024),
        nn.GELU(),
        nn.Linear(1024, 10),
    )


def _convolutional() -> nn.Module:
    layers = [
        nn.Sequential(
            nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2)
        )
        for i, o in ((3, 24), (24, 48), (48, 96))
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96 * 64, 10))


def _vision() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    shape = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        image_size=64,
        patch_size=8,
    )
    return ViTForImageClassification(shape)


def _next_word(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )


def _images(size: int) -> torch.Tensor:
    return torch.randn(size, 3, 64, 64)


def _ids(size: int) -> torch.Tensor:
    return torch.randint(WORDS, (size, 64))


def _squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


PLAIN: dict[
    str,
    tuple[
        Callable[[], nn.Module],
        Callable[[int], Any],
        Callable[[nn.Module, Any], torch.Tensor],
    ],
] = {
    "perceptron": (_perceptron, lambda size: torch.randn(size, 16, 256), _squares),
    "CNN": (_convolutional, _images, _squares),
    "LSTM": (Recurrent, _ids, _next_word),
    "decoder": (Decoder, _ids, _next_word),
    "ViT": (
        _vision,
        _images,
        lambda model, images: model(images).logits.square().mean(),
    ),
}


_PLAIN_BYTES = 300_000_000
"""Memory with which answers have two or three digits, as on GPUs."""


def _causal_lm() -> Subject:
    example = "hf_trainer_causal_lm"

    def batch(size: int) -> Any:
        from autotune.subjects.jobs.longest_samples import Longest

        return _example(example).collate(list(Longest(_example(example).Lines(), size)))

    return Subject(
        step=example,
        model=lambda: _example(example).make_trainer().model,
        batch=batch,
        loss=lambda model, inputs: model(**inputs).loss,
        memory_bytes=400_000_000,
    )


def _token_classifier() -> Subject:
    example = "accelerate_token_classifier"

    def batch(size: int) -> Any:
        from autotune.subjects.accelerate import longest_batch

        return longest_batch(
            _example(example).Sentences(), _example(example).collate, size
        )

    return Subject(
        step=example,
        model=lambda: _example(example).make_parts()[1],
        batch=batch,
        loss=lambda model, inputs: model(**inputs).loss,
        memory_bytes=400_000_000,
    )


def _classifier() -> Subject:
    example = "lightning_vision"

    def loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            model(images), torch.zeros(len(images), dtype=torch.long)
        )

    return Subject(
        step=example,
        model=lambda: _example(example).Classifier().network,
        batch=_images,
        loss=loss,
        memory_bytes=200_000_000,
    )


def subjects() -> dict[str, Subject]:
    """Return the subjects by name."""
    plain = {
        name: Subject(
            step=name, model=model, batch=batch, loss=loss, memory_bytes=_PLAIN_BYTES
        )
        for name, (model, batch, loss) in PLAIN.items()
    }
    return {
        "Trainer: causal LM": _causal_lm(),
        "Lightning: CNN": _classifier(),
        "Accelerate: token classifier": _token_classifier(),
        **plain,
    }


def own_code(name: str, *, on_gpu: bool = False) -> tuple[str, dict[str, Any]]:
    """Return ``--step`` and ``--set`` of a subject.

    On a pretended GPU, examples too run without cuDNN.
    """
    step = subjects()[name].step
    if step in PLAIN:
        return "benchmarks.subjects:build_step", {"kind": step}
    return (
        ("benchmarks.subjects:example_step", {"example": step})
        if on_gpu
        else (f"{step}:build_step", {})
    )
