"""Small models, one for each way in which recomputation goes wrong in practice."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Linear layers with a nonlinearity that backward needs."""

    def __init__(self, depth: int = 4, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


class Dropout(nn.Module):
    """Dropout twice a layer, once inside attention, and other random ops between."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).chunk(3, dim=-1)
            x = x + F.dropout(out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)), 0.3)
            x = x * (1 + 0.1 * torch.rand_like(x)) + 0.1 * torch.bernoulli(torch.full_like(x, 0.5))
            x = F.layer_norm(x, (16,)) + torch.randn(x.shape) * 0.01
        return x


class BatchNorm(nn.Module):
    """BatchNorm, in-place ReLU after it, and an exponential average kept by hand."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.3), nn.BatchNorm2d(4)])
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)), inplace=True)
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean((0, 2, 3)), alpha=0.1)
        return x * self.average.view(1, 4, 1, 1)


class BufferReadInBackward(nn.Module):
    """Backward multiplies by the buffer as it was when forward began; the step then changes it."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) * self.scale.clone())
        self.scale.add_(1.0)
        return y.sin()


class InPlace(nn.Module):
    """add_, mul_, slice assignment and index_put on intermediates, and views of what was changed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.add_(1.0).mul_(0.5)
        y[:, :2] = y[:, 2:4] * 2
        left, right = y.chunk(2, dim=1)
        z = torch.cat([left.relu(), right.expand(right.shape).tanh()], dim=1).clone()
        z[0] = 0.0
        return self.b(z).sigmoid_()


class Tied(nn.Module):
    """Embedding and head share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.mid = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(self.embed(tokens))))


class Frozen(nn.Module):
    """The first half needs no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.top = MLP(2, 16), MLP(2, 16)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.base(x))


@dataclasses.dataclass
class Output:
    """A model output with everything in it."""

    main: Tensor
    extra: dict[str, Any]
    missing: None = None
    note: str = "note"


class Nested(nn.Module):
    """Keyword, optional and flag arguments; a dataclass out, with a view, an input and an integer tensor in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, flip: bool = False, scale: float = 1.0) -> Output:
        y = torch.tanh(self.linear(x)) * scale
        if mask is not None:
            y = y * mask
        if flip:
            y = y.flip(0)
        return Output(y.sum(1), {"pair": (y, y.transpose(0, 1)), "mask": mask, "best": y.argmax(1), "x": x})


class LossAndLogits(nn.Module):
    """Returns (loss, logits) as Hugging Face models with labels do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = MLP(2, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(x))
        return F.cross_entropy(logits, labels), logits


class Branches(nn.Module):
    """Looks at a value to choose its way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # the line that errors must name
            return y.relu()
        return y
