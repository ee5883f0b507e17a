"""An imitation of the paper's public trainer (arXiv 2509.05258).

It has BERT's mathematics and is written from a description, so that losses can be
compared with ours; ``autotune.subjects.mlm.jobs.paper_model`` follows the
public trainer.

* Padding and precision: fp32; every sample is padded to the full sequence length.
* Model: attention head by head with a matrix of weights in memory, positions embedded
  in a Python loop over samples, a dense MLM head. The number of parameters and the
  mathematics are BERT's, but attention weights are not dropped.
* Step: an optimizer that is not fused, two synchronised logging calls per step.

Shapes: B sequences, S positions of a sequence, D hidden, E of a head, V words.
"""

import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig


class _Head(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(hidden, width) for _ in range(3))

    def forward(
        self, hidden_BSD: torch.Tensor, allowed_BS: torch.Tensor
    ) -> torch.Tensor:
        query_BSE, key_BSE, value_BSE = (
            self.query(hidden_BSD),
            self.key(hidden_BSD),
            self.value(hidden_BSD),
        )
        scores_BSS = (
            torch.bmm(query_BSE, key_BSE.transpose(1, 2)) / query_BSE.shape[-1] ** 0.5
        )
        scores_BSS = scores_BSS.masked_fill(~allowed_BS[:, None, :], -torch.inf)
        return torch.bmm(functional.softmax(scores_BSS, dim=-1), value_BSE)


class _Layer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.heads = nn.ModuleList(_Head(hidden, hidden // heads) for _ in range(heads))
        self.joined = nn.Linear(hidden, hidden)
        self.wide = nn.Linear(hidden, config.intermediate_size)
        self.narrow = nn.Linear(config.intermediate_size, hidden)
        self.norms = nn.ModuleList(
            nn.LayerNorm(hidden, eps=config.layer_norm_eps) for _ in range(2)
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, hidden_BSD: torch.Tensor, allowed_BS: torch.Tensor
    ) -> torch.Tensor:
        attended_BSD = torch.cat(
            [head(hidden_BSD, allowed_BS) for head in self.heads], dim=-1
        )
        hidden_BSD = self.norms[0](hidden_BSD + self.dropout(self.joined(attended_BSD)))
        fed_BSD: torch.Tensor = self.norms[1](
            hidden_BSD
            + self.dropout(self.narrow(functional.gelu(self.wide(hidden_BSD))))
        )
        return fed_BSD


class PaperModel(nn.Module):
    """A BERT as that trainer computes it.

    Args:
        config: The shape, and the dropout of hidden states.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.words = nn.Embedding(config.vocab_size, hidden)
        self.positions = nn.Embedding(config.max_position_embeddings, hidden)
        self.norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layers = nn.ModuleList(
            _Layer(config) for _ in range(config.num_hidden_layers)
        )
        self.transform = nn.Sequential(
            nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden)
        )
        self.decoder = nn.Linear(hidden, config.vocab_size)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=config.initializer_range)
        self.decoder.weight = self.words.weight

    def forward(self, ids_BS: torch.Tensor, allowed_BS: torch.Tensor) -> torch.Tensor:
        """Logits of every position, shape (B, S, V)."""
        hidden_BSD = self.words(ids_BS) + self._positions(ids_BS, allowed_BS)
        hidden_BSD = self.dropout(self.norm(hidden_BSD))
        for layer in self.layers:
            hidden_BSD = layer(hidden_BSD, allowed_BS)
        logits_BSV: torch.Tensor = self.decoder(self.transform(hidden_BSD))
        return logits_BSV

    def _positions(
        self, ids_BS: torch.Tensor, allowed_BS: torch.Tensor
    ) -> torch.Tensor:
        width = ids_BS.shape[1]
        rows = []
        for allowed_S in allowed_BS:
            tokens = int(allowed_S.sum().item())  # each of these waits for the device
            places_S = torch.zeros(width, dtype=torch.int64, device=ids_BS.device)
            places_S[:tokens] = torch.arange(tokens, device=ids_BS.device)
            rows.append(self.positions(places_S))
        return torch.stack(rows)
