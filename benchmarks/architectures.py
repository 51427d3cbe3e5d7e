"""What people train, at reduced depth and width: random weights from configurations, nothing downloaded.

`ARCHITECTURES` maps a name to a factory that takes a batch size and returns `(model, example_input, loss)` in training
mode; `benchmarks/zoo.py` and `tests/test_zoo.py` read the same table. Widths are small, so that activations and not
weights decide the peak, as they do in training.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import Case, UNet, WithLoss

Make = Callable[[int], Case]

VOCABULARY = 256
LENGTH = 32
CLASSES = 10


# --- what the factories are made of ----------------------------------------------------------------------------------


def _tokens(batch: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def _pixels(batch: int, size: int) -> Tensor:
    return torch.randn(batch, 3, size, size)


def _hugging_face(model: str, inputs: Callable[[int], dict[str, Any]], **settings: Any) -> Make:
    """A transformers model class by name, with the configuration class that belongs to it."""

    def make(batch: int) -> Case:
        import transformers

        kind = getattr(transformers, model)
        return kind(kind.config_class(**settings)), inputs(batch), None

    return make


def _labelled(batch: int, length: int = LENGTH) -> dict[str, Any]:
    tokens = _tokens(batch, length)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _few(batch: int) -> dict[str, Any]:
    """For models that loop over the tokens, an op or more for each."""
    return _labelled(batch, 8)


def _images(size: int = 64) -> Callable[[int], dict[str, Any]]:
    return lambda batch: {"pixel_values": _pixels(batch, size), "labels": torch.randint(0, CLASSES, (batch,))}


_IMAGE_TOKEN = 2  # never drawn: `_tokens` begins at 3

# The same five sizes under the names that the configurations give them.
_USUAL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_CAUSAL = {**_USUAL, **_IDS, "use_cache": False}
_GROUPED = {**_CAUSAL, "num_key_value_heads": 2}
_PATCHES = {**{k: v for k, v in _USUAL.items() if k != "vocab_size"}, "image_size": 64, "patch_size": 8}
_SEQ2SEQ = {
    **_IDS,
    "vocab_size": VOCABULARY,
    "d_model": 48,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_start_token_id": 1,
    "max_position_embeddings": 64,
    "use_cache": False,
}
_SPEECH = {
    **_USUAL,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0,  # drawn with Python's generator, masking with numpy's: a tracer would bake either
    "apply_spec_augment": False,
    "pad_token_id": 0,
    "num_labels": CLASSES,
    "classifier_proj_size": 32,
}


def _spoken(batch: int) -> dict[str, Any]:
    return {"input_values": torch.randn(batch, 4000), "labels": torch.randint(0, CLASSES, (batch,))}


def _translated(batch: int) -> dict[str, Any]:
    return {"input_ids": _tokens(batch), "labels": _tokens(batch, LENGTH // 2)}


def _transcribed(batch: int) -> dict[str, Any]:
    return {"input_features": torch.randn(batch, 16, 64), "labels": _tokens(batch, LENGTH // 2)}


def _captioned(batch: int) -> dict[str, Any]:
    tokens = _tokens(batch)
    tokens[:, -1] = 2  # CLIP reads the text at its end-of-text token
    return {"input_ids": tokens, "pixel_values": _pixels(batch, 32), "return_loss": True}


def _two_towers(**text: Any) -> dict[str, Any]:
    both = {k: v for k, v in _USUAL.items() if k != "vocab_size"}
    return {
        "text_config": {**both, **_IDS, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, **text},
        "vision_config": {**both, "image_size": 32, "patch_size": 8},
        "projection_dim": 32,
    }


def _classed(batch: int) -> dict[str, Any]:
    return {"input_ids": _tokens(batch), "labels": torch.randint(0, CLASSES, (batch,))}


def _balanced(batch: int) -> dict[str, Any]:
    return {**_labelled(batch), "output_router_logits": True}


def _conversed(batch: int) -> dict[str, Any]:
    """An image of 16 patches stands at the start of the text."""
    tokens = _tokens(batch)
    tokens[:, :16] = _IMAGE_TOKEN
    return {"input_ids": tokens, "pixel_values": _pixels(batch, 32), "labels": tokens.clone()}


def _documented(batch: int) -> dict[str, Any]:
    corners = torch.randint(0, 500, (batch, LENGTH, 2))
    boxes = torch.cat([corners, corners + 100], -1)
    labels = torch.randint(0, CLASSES, (batch, LENGTH))
    return {"input_ids": _tokens(batch), "bbox": boxes, "pixel_values": _pixels(batch, 32), "labels": labels}


def _filmed(batch: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 4, 3, 32, 32), "labels": torch.randint(0, CLASSES, (batch,))}


def _segmented(batch: int) -> dict[str, Any]:
    return {"pixel_values": _pixels(batch, 64), "labels": torch.randint(0, CLASSES, (batch, 64, 64))}


def _series(batch: int) -> dict[str, Any]:
    return {"past_values": torch.randn(batch, 32, 3), "future_values": torch.randn(batch, 8, 3)}


def _timm(name: str, size: int = 64, **settings: Any) -> Make:
    def make(batch: int) -> Case:
        import timm

        model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings)
        return _classified(model, batch, size)

    return make


def _timm_configured(path: str, configuration: str, size: int = 64, **settings: Any) -> Make:
    """A timm model class whose sizes come in a configuration object of its own module."""

    def make(batch: int) -> Case:
        module_name, _, kind = path.rpartition(".")
        module = importlib.import_module(f"timm.models.{module_name}")
        model = getattr(module, kind)(getattr(module, configuration)(**settings), num_classes=CLASSES)
        return _classified(model, batch, size)

    return make


def _mixer(batch: int) -> Case:
    from timm.models.mlp_mixer import MlpMixer

    return _classified(MlpMixer(CLASSES, img_size=64, patch_size=8, num_blocks=2, embed_dim=48), batch, 64)


def _torchvision(name: str, size: int = 64, **settings: Any) -> Make:
    def make(batch: int) -> Case:
        import torchvision

        model = getattr(torchvision.models, name)(weights=None, num_classes=CLASSES, **settings)
        return _classified(model, batch, size)

    return make


def _classified(model: nn.Module, batch: int, size: int) -> Case:
    return WithLoss(model), (_pixels(batch, size), torch.randint(0, CLASSES, (batch,))), None


class SeveralHeads(nn.Module):
    """Cross-entropy of every head of a model that returns several, as (Inception's) tuples or torchvision's dicts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        made = self.model(x)
        heads = list(made.values() if isinstance(made, dict) else made)
        losses = [nn.functional.cross_entropy(head, labels) for head in heads]
        return losses[0] + 0.4 * sum(losses[1:], torch.zeros_like(losses[0]))


def _coatnet(batch: int) -> Case:
    from timm.models.maxxvit import MaxxVit, MaxxVitCfg

    sizes = MaxxVitCfg(embed_dim=(16, 32), depths=(1, 1), block_type=("C", "T"), stem_width=16)
    return _classified(MaxxVit(sizes, img_size=64, num_classes=CLASSES), batch, 64)


def _poolformer(batch: int) -> Case:
    from timm.models.metaformer import MetaFormer

    return _classified(MetaFormer(num_classes=CLASSES, depths=(1, 1, 1, 1), dims=(16, 24, 32, 48)), batch, 64)


def _vgg16_bn(batch: int) -> Case:
    """The sixteen layers at an eighth of their width, and a classifier to match."""
    from torchvision.models.vgg import cfgs, make_layers

    narrow: list[str | int] = [c if isinstance(c, str) else c // 8 for c in cfgs["D"]]
    model = nn.Sequential(
        make_layers(narrow, batch_norm=True),  # type: ignore[arg-type]
        nn.AdaptiveAvgPool2d((7, 7)),
        nn.Flatten(),
        nn.Linear(64 * 49, 64),
        nn.ReLU(True),
        nn.Dropout(0.5),
        nn.Linear(64, CLASSES),
    )
    return _classified(model, batch, 64)


def _shallow_resnet50(**settings: Any) -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=16, **settings)


def _resnet50(batch: int) -> Case:
    return _classified(_shallow_resnet50(), batch, 64)


def _dilated(heads: Callable[[], tuple[type[nn.Module], nn.Module, nn.Module]]) -> Make:
    """torchvision's segmenters on a dilated ResNet, with their auxiliary head."""

    def make(batch: int) -> Case:
        from torchvision.models._utils import IntermediateLayerGetter

        backbone = _shallow_resnet50(replace_stride_with_dilation=[False, True, True])
        layers = IntermediateLayerGetter(backbone, return_layers={"layer4": "out", "layer3": "aux"})
        kind, head, auxiliary = heads()
        labels = torch.randint(0, CLASSES, (batch, 64, 64))
        return SeveralHeads(kind(layers, head, auxiliary)), (_pixels(batch, 64), labels), None

    return make


def _fcn_heads() -> tuple[type[nn.Module], nn.Module, nn.Module]:
    from torchvision.models.segmentation.fcn import FCN, FCNHead

    return FCN, FCNHead(2048, CLASSES), FCNHead(1024, CLASSES)


def _deeplabv3_heads() -> tuple[type[nn.Module], nn.Module, nn.Module]:
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3
    from torchvision.models.segmentation.fcn import FCNHead

    return DeepLabV3, DeepLabHead(2048, CLASSES), FCNHead(1024, CLASSES)


def _maxvit(batch: int) -> Case:
    from torchvision.models.maxvit import MaxVit

    model = MaxVit((64, 64), 16, 4, [16, 32], [1, 1], head_dim=8, stochastic_depth_prob=0.1, num_classes=CLASSES)
    return _classified(model, batch, 64)


def _googlenet(batch: int) -> Case:
    from torchvision.models import googlenet

    model = googlenet(weights=None, num_classes=CLASSES, aux_logits=True, init_weights=False)
    return _several(model, batch, 64)


def _inception_v3(batch: int) -> Case:
    from torchvision.models.inception import BasicConv2d, inception_v3

    model = inception_v3(weights=None, num_classes=CLASSES, aux_logits=True, init_weights=False)
    assert model.AuxLogits is not None
    model.AuxLogits.conv1 = BasicConv2d(128, 768, kernel_size=1)  # its 5x5 window needs images of 299 pixels
    return _several(model, batch, 107)


def _several(model: nn.Module, batch: int, size: int) -> Case:
    return SeveralHeads(model), (_pixels(batch, size), torch.randint(0, CLASSES, (batch,))), None


def _unet(batch: int) -> Case:
    return WithLoss(UNet(width=8, depth=3)), (_pixels(batch, 32), torch.randint(0, 4, (batch, 32, 32))), None


def _denoised(batch: int, model: nn.Module, **inputs: Any) -> Case:
    """A diffusion model on noise at a random time; its loss, the noise it should have found, is computed outside."""
    return model, {"timestep": torch.randint(0, 1000, (batch,)), **inputs, "return_dict": True}, None


def _diffusion_unet(batch: int) -> Case:
    from diffusers.models.unets.unet_2d import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
    )
    return _denoised(batch, model, sample=_pixels(batch, 16))


def _conditioned_unet(batch: int) -> Case:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
        cross_attention_dim=32,
    )
    sample, words = torch.randn(batch, 4, 16, 16), torch.randn(batch, 8, 32)
    return _denoised(batch, model, sample=sample, encoder_hidden_states=words)


def _diffusion_transformer(batch: int) -> Case:
    from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=16,
    )
    words = {"encoder_hidden_states": torch.randn(batch, 8, 32), "pooled_projections": torch.randn(batch, 32)}
    return _denoised(batch, model, hidden_states=torch.randn(batch, 4, 16, 16), **words)


def _autoencoder(batch: int) -> Case:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    sizes: dict[str, Any] = {
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
        "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
        "norm_num_groups": 8,
    }
    return AutoencoderKL(**sizes), {"sample": _pixels(batch, 32), "sample_posterior": True}, None


class RecurrentLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 48)
        self.layers = nn.LSTM(48, 48, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(48, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.layers(self.embedding(tokens[:, :-1]))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _lstm(batch: int) -> Case:
    return RecurrentLanguageModel(), (_tokens(batch),), None


class Recommender(nn.Module):
    """DLRM: bags of embeddings, and the products of every two of them."""

    def __init__(self, tables: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(VOCABULARY, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(width + tables * (tables + 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, ids: Tensor, starts: Tensor, clicked: Tensor) -> Tensor:
        x = self.bottom(dense)
        every = torch.stack([x, *(table(row, starts) for table, row in zip(self.tables, ids, strict=True))], 1)
        first, second = torch.tril_indices(every.shape[1], every.shape[1], -1)
        pairs = (every @ every.mT)[:, first, second]
        logits = self.top(torch.cat([x, pairs], 1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, clicked)


def _dlrm(batch: int) -> Case:
    rows = 32 * batch
    ids, starts = torch.randint(0, VOCABULARY, (6, 4 * rows)), torch.arange(0, 4 * rows, 4)
    return Recommender(6, 16), (torch.randn(rows, 13), ids, starts, torch.rand(rows)), None


def _lora(base: str, **settings: Any) -> Make:
    """Low-rank adapters on a frozen base."""

    def make(batch: int) -> Case:
        import peft

        model, example, _ = ARCHITECTURES[base](batch)
        config = peft.LoraConfig(r=4, lora_dropout=0.1, **settings)
        return peft.get_peft_model(model, config), example, None  # type: ignore[arg-type]

    return make


# --- the table -------------------------------------------------------------------------------------------------------

_GPT2 = {
    **_IDS,
    "vocab_size": VOCABULARY,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": LENGTH,
    "use_cache": False,
}

ARCHITECTURES: dict[str, Make] = {
    # language models of one stack
    "gpt2": _hugging_face("GPT2LMHeadModel", _labelled, **_GPT2),
    "gptj": _hugging_face("GPTJForCausalLM", _labelled, **_GPT2, rotary_dim=4),
    "gpt_neox": _hugging_face("GPTNeoXForCausalLM", _labelled, **_CAUSAL),
    "opt": _hugging_face(
        "OPTForCausalLM",
        _labelled,
        **_CAUSAL,
        ffn_dim=96,
        word_embed_proj_dim=48,
        max_position_embeddings=64,
    ),
    "bloom": _hugging_face(
        "BloomForCausalLM",
        _labelled,
        **_IDS,
        vocab_size=VOCABULARY,
        hidden_size=48,
        n_layer=2,
        n_head=4,
        use_cache=False,
    ),
    "falcon": _hugging_face("FalconForCausalLM", _labelled, **_CAUSAL),
    "mpt": _hugging_face(
        "MptForCausalLM",
        _labelled,
        d_model=48,
        n_heads=4,
        n_layers=2,
        vocab_size=VOCABULARY,
        max_seq_len=64,
        use_cache=False,
    ),
    "llama": _hugging_face("LlamaForCausalLM", _labelled, **_GROUPED),
    "mistral": _hugging_face("MistralForCausalLM", _labelled, **_GROUPED, sliding_window=16),
    "qwen2": _hugging_face("Qwen2ForCausalLM", _labelled, **_GROUPED),
    "qwen3": _hugging_face("Qwen3ForCausalLM", _labelled, **_GROUPED, head_dim=12),
    "gemma": _hugging_face("GemmaForCausalLM", _labelled, **_GROUPED, head_dim=12),
    "gemma2": _hugging_face("Gemma2ForCausalLM", _labelled, **_GROUPED, head_dim=12, sliding_window=16),
    "gemma3": _hugging_face(
        "Gemma3ForCausalLM",
        _labelled,
        **_GROUPED,
        head_dim=12,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi": _hugging_face("PhiForCausalLM", _labelled, **_CAUSAL),
    "phi3": _hugging_face("Phi3ForCausalLM", _labelled, **_GROUPED),
    "olmo2": _hugging_face("Olmo2ForCausalLM", _labelled, **_GROUPED),
    "stablelm": _hugging_face("StableLmForCausalLM", _labelled, **_GROUPED, partial_rotary_factor=0.5),
    "cohere": _hugging_face("CohereForCausalLM", _labelled, **_GROUPED),
    # mixtures of experts, state spaces, linear recurrences
    "mixtral": _hugging_face("MixtralForCausalLM", _labelled, **_GROUPED, num_local_experts=4),
    "qwen2_moe": _hugging_face(
        "Qwen2MoeForCausalLM",
        _labelled,
        **_GROUPED,
        num_experts=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "mamba": _hugging_face(
        "MambaForCausalLM",
        _few,
        **_IDS,
        vocab_size=VOCABULARY,
        hidden_size=48,
        num_hidden_layers=1,
        state_size=8,
        use_cache=False,
    ),
    "mamba2": _hugging_face(
        "Mamba2ForCausalLM",
        _labelled,
        **_IDS,
        vocab_size=VOCABULARY,
        hidden_size=48,
        num_hidden_layers=1,
        state_size=8,
        num_heads=6,
        head_dim=16,
        n_groups=1,
        chunk_size=16,
        use_cache=False,
    ),
    "rwkv": _hugging_face(
        "RwkvForCausalLM",
        _few,
        **_IDS,
        vocab_size=VOCABULARY,
        hidden_size=48,
        num_hidden_layers=2,
        context_length=64,
        use_cache=False,
    ),
    "deepseek_v3": _hugging_face(
        "DeepseekV3ForCausalLM",
        _labelled,
        **_CAUSAL,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
    ),
    "gpt_oss": _hugging_face(
        "GptOssForCausalLM", _labelled, **_GROUPED, head_dim=12, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": _hugging_face(
        "Qwen3MoeForCausalLM",
        _balanced,
        **_GROUPED,
        head_dim=12,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "qwen3_next": _hugging_face(
        "Qwen3NextForCausalLM",
        _labelled,
        **_GROUPED,
        head_dim=12,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    # encoders
    "bert_classifier": _hugging_face("BertForSequenceClassification", _classed, **_USUAL, num_labels=CLASSES),
    "esm": _hugging_face("EsmForMaskedLM", _labelled, **_USUAL, pad_token_id=1, position_embedding_type="rotary"),
    "bert": _hugging_face("BertForMaskedLM", _labelled, **_USUAL),
    "roberta": _hugging_face("RobertaForMaskedLM", _labelled, **_USUAL, pad_token_id=1),
    "distilbert": _hugging_face(
        "DistilBertForMaskedLM",
        _labelled,
        vocab_size=VOCABULARY,
        dim=48,
        hidden_dim=96,
        n_layers=2,
        n_heads=4,
    ),
    "albert": _hugging_face("AlbertForMaskedLM", _labelled, **_USUAL, embedding_size=16),
    "electra": _hugging_face("ElectraForMaskedLM", _labelled, **_USUAL, embedding_size=16),
    "deberta": _hugging_face(
        "DebertaV2ForMaskedLM",
        _labelled,
        **_USUAL,
        relative_attention=True,
        position_buckets=8,
        max_relative_positions=16,
        pos_att_type=["p2c", "c2p"],
    ),
    "modernbert": _hugging_face(
        "ModernBertForMaskedLM",
        _labelled,
        **_USUAL,
        pad_token_id=0,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=16,
    ),
    "xlnet": _hugging_face(
        "XLNetLMHeadModel",
        _labelled,
        vocab_size=VOCABULARY,
        d_model=48,
        n_layer=2,
        n_head=4,
        d_inner=96,
    ),
    "longformer": _hugging_face("LongformerForMaskedLM", _labelled, **_USUAL, attention_window=8, pad_token_id=1),
    # encoders with decoders
    "t5": _hugging_face(
        "T5ForConditionalGeneration",
        _translated,
        vocab_size=VOCABULARY,
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    ),
    "bart": _hugging_face("BartForConditionalGeneration", _translated, **_SEQ2SEQ, forced_eos_token_id=2),
    "pegasus": _hugging_face("PegasusForConditionalGeneration", _translated, **_SEQ2SEQ),
    "whisper": _hugging_face(
        "WhisperForConditionalGeneration",
        _transcribed,
        **_SEQ2SEQ,
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=64,
    ),
    # speech, images, both, series
    "wav2vec2": _hugging_face("Wav2Vec2ForSequenceClassification", _spoken, **_SPEECH),
    "hubert": _hugging_face("HubertForSequenceClassification", _spoken, **_SPEECH),
    "vit": _hugging_face("ViTForImageClassification", _images(), **_PATCHES, num_labels=CLASSES),
    "deit": _hugging_face("DeiTForImageClassification", _images(), **_PATCHES, num_labels=CLASSES),
    "beit": _hugging_face(
        "BeitForImageClassification",
        _images(),
        **_PATCHES,
        num_labels=CLASSES,
        drop_path_rate=0.1,
        use_relative_position_bias=True,
    ),
    "dinov2": _hugging_face("Dinov2ForImageClassification", _images(), **_PATCHES, num_labels=CLASSES),
    "vit_mae": _hugging_face(
        "ViTMAEForPreTraining",
        lambda batch: {"pixel_values": _pixels(batch, 64)},
        **_PATCHES,
        decoder_hidden_size=32,
        decoder_intermediate_size=64,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
    ),
    "swin": _hugging_face(
        "SwinForImageClassification",
        _images(),
        image_size=64,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=CLASSES,
    ),
    "segformer": _hugging_face(
        "SegformerForSemanticSegmentation",
        _segmented,
        num_encoder_blocks=4,
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 24, 32],
        num_attention_heads=[1, 2, 3, 4],
        decoder_hidden_size=32,
        num_labels=CLASSES,
    ),
    "clip": _hugging_face("CLIPModel", _captioned, **_two_towers()),
    "siglip": _hugging_face(
        "SiglipModel",
        _captioned,
        **{k: v for k, v in _two_towers(projection_size=48).items() if k != "projection_dim"},
    ),
    "llava": _hugging_face(
        "LlavaForConditionalGeneration",
        _conversed,
        text_config={"model_type": "llama", **_GROUPED},
        vision_config={"model_type": "clip_vision_model", **_PATCHES, "image_size": 32, "num_hidden_layers": 3},
        image_token_index=_IMAGE_TOKEN,
        image_token_id=_IMAGE_TOKEN,
        pad_token_id=0,
    ),
    "layoutlmv3": _hugging_face(
        "LayoutLMv3ForTokenClassification",
        _documented,
        **_USUAL,
        pad_token_id=1,
        input_size=32,
        patch_size=8,
        coordinate_size=8,
        shape_size=8,
        num_labels=CLASSES,
    ),
    "videomae": _hugging_face(
        "VideoMAEForVideoClassification", _filmed, **{**_PATCHES, "image_size": 32}, num_frames=4, num_labels=CLASSES
    ),
    "patchtst": _hugging_face(
        "PatchTSTForPrediction",
        _series,
        num_input_channels=3,
        context_length=32,
        prediction_length=8,
        patch_length=4,
        patch_stride=4,
        d_model=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,
        head_dropout=0.1,
    ),
    # timm
    "timm_resnet50": _timm("resnet50", layers=(1, 1, 1, 1), stem_width=16, channels=(16, 32, 64, 128)),
    "timm_convnext": _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(16, 32, 48, 64), drop_path_rate=0.1),
    "timm_efficientnetv2": _timm(
        "efficientnetv2_s",
        channel_multiplier=0.3,
        depth_multiplier=0.2,
        drop_rate=0.2,
        drop_path_rate=0.1,
    ),
    "timm_regnet": _timm_configured(
        "regnet.RegNet",
        "RegNetCfg",
        depth=6,
        w0=16,
        wa=16.0,
        wm=2.0,
        group_size=8,
        se_ratio=0.25,
    ),
    "timm_densenet121": _timm("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    "timm_mobilenetv3": _timm("mobilenetv3_small_050", depth_multiplier=0.5),
    "timm_swin": _timm(
        "swin_tiny_patch4_window7_224",
        img_size=64,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
        drop_path_rate=0.1,
    ),
    "timm_vit": _timm(
        "vit_tiny_patch16_224", img_size=64, patch_size=8, embed_dim=48, depth=2, num_heads=4, drop_path_rate=0.1
    ),
    "timm_mixer": _mixer,
    "timm_nfnet": _timm_configured(
        "nfnet.NormFreeNet",
        "_nfnet_cfg",
        depths=(1, 1, 1, 1),
        channels=(32, 64, 96, 96),
        group_size=16,
    ),
    "timm_edgenext": _timm("edgenext_xx_small", depths=(1, 1, 2, 1), dims=(16, 24, 32, 48), heads=(4, 4, 4, 4)),
    "timm_coatnet": _coatnet,
    "timm_ghostnet": _timm("ghostnet_050"),
    "timm_xcit": _timm("xcit_nano_12_p16_224", 64, depth=2),
    "timm_poolformer": _poolformer,
    # torchvision
    "vgg16_bn": _vgg16_bn,
    "resnet50": _resnet50,
    "inception_v3": _inception_v3,
    "googlenet": _googlenet,
    "deeplabv3": _dilated(_deeplabv3_heads),
    "fcn": _dilated(_fcn_heads),
    "mobilenet_v2": _torchvision("mobilenet_v2", width_mult=0.35),
    "shufflenet_v2": _torchvision("shufflenet_v2_x0_5"),
    "maxvit": _maxvit,
    "efficientnet_b0": _torchvision("efficientnet_b0"),
    # plain torch, diffusion, adapters
    "unet": _unet,
    "diffusion_unet": _diffusion_unet,
    "conditioned_unet": _conditioned_unet,
    "diffusion_transformer": _diffusion_transformer,
    "autoencoder_kl": _autoencoder,
    "lstm": _lstm,
    "dlrm": _dlrm,
}
ARCHITECTURES["lora_gpt2"] = _lora("gpt2", target_modules=["c_attn"], fan_in_fan_out=True)
ARCHITECTURES["lora_llama"] = _lora("llama", target_modules=["q_proj", "v_proj"])
ARCHITECTURES["dora_llama"] = _lora("llama", target_modules=["q_proj", "v_proj"], use_dora=True)


def architecture(name: str, batch: int = 2) -> Case:
    """The named architecture in training mode, from seed 0."""
    torch.manual_seed(0)
    model, example, loss = ARCHITECTURES[name](batch)
    return model.train(), example, loss
