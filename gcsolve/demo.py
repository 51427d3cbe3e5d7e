"""`gcsolve demo`: a plain-torch GPT of GPT-2-small's shape, trained under four plans, nothing to download."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention and MLP with dropout, as in GPT-2."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm_attention(x)).view(split).permute(2, 0, 3, 1, 4)
        drop = self.attention_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, length, width)))
        hidden = F.gelu(self.up(self.norm_mlp(x)), approximate="tanh")
        return x + self.dropout(self.down(hidden))


class GPT(nn.Module):
    """Next-token loss of a GPT; the output layer shares the embedding's weight.

    Called with tokens of shape (batch, length); returns the mean cross-entropy of each token given those before it.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 8192,
        length: int = 1024,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def gpt2_small(batch: int = 1, length: int = 768, vocabulary: int = 8192, seed: int = 0) -> tuple[GPT, Tensor]:
    """(model, tokens): GPT-2-small's 12 layers of width 768 with dropout, random weights and tokens.

    The vocabulary is cut from 50257 to 8192: with batches small enough for a CPU the full one leaves little of the
    memory to the layers, which are what is to be seen. Usable as `gcsolve plan gcsolve.demo:gpt2_small --budget 0.5`.
    """
    torch.manual_seed(seed)
    model = GPT(vocabulary=vocabulary)
    return model, torch.randint(0, vocabulary, (batch, length))
