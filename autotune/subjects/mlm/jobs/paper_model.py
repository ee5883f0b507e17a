"""The model and the step of the paper's public trainer (arXiv 2509.05258).

They are written from facts about that trainer (``undertale-re``, commit 1dae6f2), and
do not have BERT's mathematics:

* Model: layers that normalise before attention and MLP; attention head by head, with a
  matrix of weights in memory, which are not dropped; dropout in embeddings and after
  the MLP only; a decoder with its own weights, over all positions.
* Positions: two tables, for the instruction of a token and for its position in the
  instruction. The second is computed sample by sample and instruction by instruction,
  with a wait for the GPU in each.
* Step: fp32 without TF32 or autocast, AdamW that is not fused, no clipping, and two
  logged values for which the host waits.

Shapes: B sequences, S positions of a sequence, D hidden, E of a head, V words.
"""

import torch
from torch import nn
from torch.nn import functional

DROPOUT, EPSILON, LEARNING_RATE = 0.1, 1e-12, 1e-4
IDS_PER_SEPARATOR = 4
"""Every fourth id ends an instruction, as ids of the datasets here mean nothing: about
one token in 4.6, which is the length of an instruction."""


class RecipeHead(nn.Module):
    """One attention head.

    Args:
        hidden: Hidden size.
        width: Size of the head.
    """

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, width)
        self.key = nn.Linear(hidden, width)
        self.value = nn.Linear(hidden, width)

    def forward(
        self, hidden_BSD: torch.Tensor, allowed_BS: torch.Tensor
    ) -> torch.Tensor:
        """Return attended values, shape (B, S, E)."""
        query_BSE = self.query(hidden_BSD)
        key_BSE = self.key(hidden_BSD)
        scores_BSS = torch.bmm(query_BSE, key_BSE.mT) / query_BSE.shape[-1] ** 0.5
        scores_BSS = scores_BSS.masked_fill(~allowed_BS[:, None, :], -1e9)
        weights_BSS = functional.softmax(scores_BSS, dim=-1)
        return torch.bmm(weights_BSS, self.value(hidden_BSD))


class RecipeLayer(nn.Module):
    """One layer, which normalises its inputs.

    Args:
        hidden: Hidden size.
        heads: Attention heads.
        intermediate: Size of the MLP.
    """

    def __init__(self, hidden: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.heads = nn.ModuleList(
            RecipeHead(hidden, hidden // heads) for _ in range(heads)
        )
        self.joined = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, intermediate),
            nn.GELU(),
            nn.Linear(intermediate, hidden),
            nn.Dropout(DROPOUT),
        )

    def forward(
        self, hidden_BSD: torch.Tensor, allowed_BS: torch.Tensor
    ) -> torch.Tensor:
        """Return hidden states, shape (B, S, D)."""
        normal_BSD = self.attention_norm(hidden_BSD)
        attended = [head(normal_BSD, allowed_BS) for head in self.heads]
        hidden_BSD = hidden_BSD + self.joined(torch.cat(attended, dim=-1))
        fed_BSD: torch.Tensor = self.mlp(self.mlp_norm(hidden_BSD))
        return hidden_BSD + fed_BSD


class RecipeEmbedding(nn.Module):
    """Embedding of words, instructions, and positions inside an instruction.

    Args:
        vocab_size: Number of words.
        hidden: Hidden size.
        seq_length: Positions of a sequence.
        first_word: First id that is not special.
    """

    def __init__(
        self, vocab_size: int, hidden: int, seq_length: int, first_word: int
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden)
        self.instructions = nn.Embedding(seq_length, hidden)
        self.arguments = nn.Embedding(seq_length, hidden)
        self.norm = nn.LayerNorm(hidden, eps=EPSILON)
        self.dropout = nn.Dropout(DROPOUT)
        self.first_word = first_word

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Return embedded tokens, shape (B, S, D)."""
        instruction_BS, argument_BS = self.positions(ids_BS)
        hidden_BSD = self.words(ids_BS) + self.instructions(instruction_BS)
        embedded_BSD: torch.Tensor = self.dropout(
            self.norm(hidden_BSD + self.arguments(argument_BS))
        )
        return embedded_BSD

    def positions(self, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the instruction of each token, and its position in it, each (B, S)."""
        ends_BS = (ids_BS % IDS_PER_SEPARATOR == 0) & (ids_BS >= self.first_word)
        starts_BS = torch.roll(ends_BS, 1, dims=1)
        starts_BS[:, 0] = False
        instruction_BS = starts_BS.cumsum(dim=1)
        argument_BS = torch.zeros_like(instruction_BS)
        for sample, instruction_S in enumerate(instruction_BS):
            # Each length waits for the GPU.
            lengths = [int(length) for length in instruction_S.bincount()]
            pieces = [torch.arange(length) for length in lengths]
            argument_BS[sample] = torch.cat(pieces)
        return instruction_BS, argument_BS


class RecipeModel(nn.Module):
    """The encoder with its masked-LM head over all positions.

    Args:
        shape: ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads`` and
            ``intermediate_size``.
        vocab_size: Number of words.
        seq_length: Positions of a sequence.
        first_word: First id that is not special.
    """

    def __init__(
        self, shape: dict[str, int], vocab_size: int, seq_length: int, first_word: int
    ) -> None:
        super().__init__()
        hidden = shape["hidden_size"]
        self.embedding = RecipeEmbedding(vocab_size, hidden, seq_length, first_word)
        self.layers = nn.ModuleList(
            RecipeLayer(
                hidden, shape["num_attention_heads"], shape["intermediate_size"]
            )
            for _ in range(shape["num_hidden_layers"])
        )
        self.head = nn.Sequential(
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.LayerNorm(hidden, eps=EPSILON),
            nn.Linear(hidden, vocab_size),
        )

    def forward(self, ids_BS: torch.Tensor, allowed_BS: torch.Tensor) -> torch.Tensor:
        """Return logits of every position, shape (B, S, V)."""
        hidden_BSD = self.embedding(ids_BS)
        for layer in self.layers:
            hidden_BSD = layer(hidden_BSD, allowed_BS)
        logits_BSV: torch.Tensor = self.head(hidden_BSD)
        return logits_BSV


class RecipeStep:
    """One optimizer step after the other.

    Args:
        model: The model, on its device.
        device: The device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.logged: list[float] = []

    def run(self, batch: dict[str, torch.Tensor]) -> None:
        """Take a step on a collated batch, whose tensors have shape (B, S)."""
        ids_BS = batch["input_ids"].to(self.device)
        allowed_BS = batch["attention_mask"].to(self.device).bool()
        labels_BS = batch["labels"].to(self.device)
        logits_BSV = self.model(ids_BS, allowed_BS)
        loss = functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        rate = torch.tensor(self.optimizer.param_groups[0]["lr"], device=self.device)
        self.logged += [loss.item(), rate.item()]
