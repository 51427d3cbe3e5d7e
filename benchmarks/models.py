"""The models that the main job is shown on: random weights from configurations, nothing downloaded.

Each factory returns `(model, example_input, loss)`; every model here computes its own loss, so `loss` is None. Usable
as `gcsolve plan benchmarks.models:gpt2 --budget 0.5`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Case = tuple[nn.Module, Any, Callable[[Any], Tensor] | None]


class WithLoss(nn.Module):
    """A classifier or segmenter that takes its labels as a second input and returns its cross-entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), labels)


class UNet(nn.Module):
    """Four scales, two convolutions a scale, skips joined by concatenation."""

    def __init__(self, channels: int = 3, classes: int = 4, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        widths = [width << i for i in range(depth)]
        self.down = nn.ModuleList(_double(a, b) for a, b in zip([channels, *widths[:-1]], widths, strict=True))
        self.rise = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.up = nn.ModuleList(_double(2 * a, a) for a in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, down in enumerate(self.down):
            x = down(x if i == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for rise, up in zip(self.rise, self.up, strict=True):
            x = up(torch.cat([skips.pop(), rise(x)], dim=1))
        return self.head(x)


def _double(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )


def gpt2(layers: int = 12, width: int = 768, batch: int = 4, length: int = 512, vocabulary: int = 50257) -> Case:
    """Hugging Face GPT-2 with labels and dropout 0.1."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    heads = max(1, width // 64)
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, use_cache=False)
    model = GPT2LMHeadModel(config).train()
    tokens = torch.randint(0, config.vocab_size, (batch, length))
    return model, {"input_ids": tokens, "labels": tokens.clone()}, None


def llama(layers: int = 8, width: int = 512, batch: int = 2, length: int = 512, vocabulary: int = 32000) -> Case:
    """A Hugging Face Llama with grouped-query attention (four query heads a key head) and labels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(4, width // 64)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=vocabulary,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    tokens = torch.randint(0, config.vocab_size, (batch, length))
    return model, {"input_ids": tokens, "labels": tokens.clone()}, None


def resnet50(batch: int = 8, size: int = 224, blocks: tuple[int, ...] = (3, 4, 6, 3)) -> Case:
    """torchvision's ResNet-50, or one with other numbers of blocks."""
    from torchvision.models.resnet import Bottleneck, ResNet

    torch.manual_seed(0)
    model = WithLoss(ResNet(Bottleneck, list(blocks))).train()
    return model, (torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))), None


def vit_small(batch: int = 8, size: int = 224, depth: int = 12) -> Case:
    """timm's ViT-S/16."""
    import timm

    torch.manual_seed(0)
    made = timm.create_model("vit_small_patch16_224", pretrained=False, img_size=size, depth=depth)
    model = WithLoss(made).train()
    return model, (torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))), None


def unet(batch: int = 2, size: int = 256) -> Case:
    """A U-Net in plain torch."""
    torch.manual_seed(0)
    model = WithLoss(UNet()).train()
    return model, (torch.randn(batch, 3, size, size), torch.randint(0, 4, (batch, size, size))), None


def mlp(layers: int = 6, width: int = 1024, batch: int = 4096) -> Case:
    """Linear, BatchNorm, GELU and dropout, repeated."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1)]
    model = WithLoss(nn.Sequential(*parts, nn.Linear(width, 10))).train()
    return model, (torch.randn(batch, width), torch.randint(0, 10, (batch,))), None


def llama_7b_meta(batch: int = 8, length: int = 4096) -> Case:
    """A Llama of 7 billion parameters in bfloat16 on the meta device: shapes only, to plan what cannot run here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        max_position_embeddings=length,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16().train()
    tokens = torch.zeros((batch, length), dtype=torch.int64, device="meta")
    return model, {"input_ids": tokens, "labels": tokens}, None


MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "llama": llama,
    "resnet50": resnet50,
    "vit_small": vit_small,
    "unet": unet,
    "mlp": mlp,
}
