"""Modules of transformers, timm and torchvision that `module_matrix.py` compiles: small, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Callable[[int], dict[str, Tensor]]


@dataclass(frozen=True)
class Entry:
    """A module of the matrix.

    Attributes:
        family: library and kind of module.
        name: name in the library.
        build: returns the module, and a function from a batch size to inputs by forward's parameter names.
    """

    family: str
    name: str
    build: Callable[[], tuple[nn.Module, Inputs]] = field(repr=False)


# Sizes that a configuration takes where it has them.
_SMALL: Mapping[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "embedding_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "image_size": 32,
    "use_cache": False,
    "pad_token_id": 0,
}
_LENGTH = 12


def _each(names: str, value: Any) -> dict[str, Any]:
    """The same value for each of several names."""
    return dict.fromkeys(names.split(), value)


_T5 = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "num_decoder_layers": 1}
_WAVE = {
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
_FOUR = {"depths": [1, 1, 1, 1]}
_SWIN = {
    "depths": [1, 2],
    "num_heads": [2, 4],
    "embed_dim": 16,
    "window_size": 4,
    "image_size": 32,
    "patch_size": 2,
    "num_attention_heads": None,
}

_TEXT: Mapping[str, Mapping[str, Any]] = {
    **_each(
        """
    albert bert bert-generation camembert clip_text_model convbert data2vec-text deberta electra ernie eurobert fnet gte
    ibert jina_embeddings_v3 layoutlm markuplm megatron-bert mpnet mra nomic_bert roberta roberta-prelayernorm roc_bert
    roformer siglip_text_model splinter tapas xlm-roberta xlm-roberta-xl
""",
        {},
    ),
    "big_bird": {"attention_type": "original_full"},
    "canine": {"num_hash_buckets": 64},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "distilbert": {"dim": 32, "hidden_dim": 64},
    "esm": {"position_embedding_type": "rotary"},
    "flaubert": {"emb_dim": 32},
    "longformer": {"attention_window": 4},
    "luke": {"entity_vocab_size": 9, "entity_emb_size": 16},
    "mobilebert": {"true_hidden_size": 16, "intra_bottleneck_size": 16},
    "modernbert": {"pad_token_id": 0, "global_attn_every_n_layers": 2},
    "nystromformer": {"num_landmarks": _LENGTH, "segment_means_seq_len": _LENGTH},
    "rembert": {"input_embedding_size": 16},
    "squeezebert": {
        "q_groups": 2,
        "k_groups": 2,
        "v_groups": 2,
        "post_attention_groups": 1,
        "intermediate_groups": 2,
        "output_groups": 2,
    },
    "xlm": {"emb_dim": 32},
    "xlnet": {"d_head": 8, "max_position_embeddings": None, "d_inner": 64},
    "xmod": {"languages": ["en"], "default_language": "en"},
    "yoso": {"use_expectation": True},
}
_SEQ2SEQ: Mapping[str, Mapping[str, Any]] = {
    **_each(
        """
    bart blenderbot blenderbot-small m2m_100 marian mbart mvp pegasus plbart
""",
        {},
    ),
    "bigbird_pegasus": {"attention_type": "original_full"},
    "fsmt": {"src_vocab_size": 99, "tgt_vocab_size": 99, "langs": ["en", "de"]},
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 64},
    "longt5": {**_T5, "local_radius": 4},
    "mt5": _T5,
    "nllb-moe": {"num_experts": 4, "encoder_sparse_step": 2},
    "pegasus_x": {"block_size": 4, "num_global_tokens": 2},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_encoder_attention_heads": 4},
    "switch_transformers": {**_T5, "num_experts": 4},
    "t5": _T5,
    "umt5": _T5,
}
_DECODERS: Mapping[str, Mapping[str, Any]] = {
    **_each(
        """
    biogpt bloom falcon gpt2 gpt_bigcode gpt_neox llama mistral mpt olmo2 openai-gpt phi qwen2 smollm3 stablelm
""",
        {},
    ),
    "codegen": {"rotary_dim": 4, "n_inner": 64},
    "ctrl": {"dff": 64},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "mamba": {"state_size": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "qwen3": {"head_dim": 8},
}
_VISION: Mapping[str, Mapping[str, Any]] = {
    **_each(
        """
    textnet
""",
        {},
    ),
    "aimv2_vision_model": {"patch_size": 8},
    "beit": {"patch_size": 8},
    "bit": {**_FOUR, "num_groups": 4, "embedding_size": 32, "hidden_sizes": [32, 64, 64, 64]},
    "blip_vision_model": {"patch_size": 8},
    "chinese_clip_vision_model": {"patch_size": 8},
    "clip_vision_model": {"patch_size": 8},
    "convnext": {**_FOUR, "num_hidden_layers": None, "hidden_sizes": [16, 16, 32, 32]},
    "convnextv2": {**_FOUR, "num_hidden_layers": None, "hidden_sizes": [16, 32, 32, 64]},
    "data2vec-vision": {"patch_size": 8},
    "deit": {"patch_size": 8},
    "dinov2": {"patch_size": 8},
    "dinov2_with_registers": {"patch_size": 8},
    "dinov3_convnext": {**_FOUR, "hidden_sizes": [16, 16, 32, 32]},
    "dinov3_vit": {"patch_size": 8},
    "donut-swin": _SWIN,
    "focalnet": {
        "depths": [1, 1],
        "embed_dim": 16,
        "focal_levels": [2, 2],
        "focal_windows": [3, 3],
        "hidden_sizes": [16, 32],
    },
    "glpn": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 1, 2, 2]},
    "hiera": {
        "embed_dim": 16,
        "depths": [1, 1, 1],
        "num_heads": [1, 2, 2],
        "embed_dim_multiplier": 2.0,
        "num_query_pool": 2,
        "image_size": [32, 32],
        "patch_stride": [4, 4],
        "patch_padding": [2, 2],
        "query_stride": [2, 2],
        "masked_unit_size": [4, 4],
    },
    "ijepa": {"patch_size": 8},
    "internvl_vision": {"image_size": [32, 32], "patch_size": [8, 8]},
    "levit": {
        "image_size": 64,
        "depths": [1, 1, 1],
        "hidden_sizes": [16, 32, 48],
        "key_dim": [8, 8, 8],
        "num_attention_heads": [2, 3, 4],
    },
    "mgp-str": {"image_size": [32, 64], "patch_size": 8},
    "mlcd_vision_model": {"patch_size": 8},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "pixio": {"patch_size": 8},
    "poolformer": {**_FOUR, "hidden_sizes": [16, 16, 32, 32]},
    "pvt": {**_FOUR, "image_size": 64, "hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 2, 2, 4]},
    "pvt_v2": {**_FOUR, "image_size": 64, "hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 2, 2, 4]},
    "regnet": {**_FOUR, "hidden_sizes": [16, 32, 32, 64], "groups_width": 16, "embedding_size": 16},
    "resnet": {**_FOUR, "embedding_size": 16, "hidden_sizes": [16, 32, 32, 64]},
    "sam_vision_model": {
        "patch_size": 8,
        "window_size": 2,
        "global_attn_indexes": [1],
        "output_channels": 16,
        "mlp_dim": 64,
    },
    "segformer": {**_FOUR, "hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 1, 2, 2], "image_size": 64},
    "siglip_vision_model": {"patch_size": 8},
    "swiftformer": {"image_size": 64, "depths": [1, 1, 1, 1], "embed_dims": [16, 16, 32, 32]},
    "swin": _SWIN,
    "swin2sr": {**_SWIN, "patch_size": 1, "upscale": 2},
    "swinv2": _SWIN,
    "timesformer": {"patch_size": 8, "num_frames": 2},
    "tipsv2_vision_model": {"patch_size": 8},
    "videomae": {"patch_size": 8, "num_frames": 4},
    "vit": {"patch_size": 8},
    "vit_msn": {"patch_size": 8},
    "vitdet": {"patch_size": 8, "window_block_indices": [0], "window_size": 2},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "yolos": {"image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 4},
}
_AUDIO: Mapping[str, Mapping[str, Any]] = {
    "audio-spectrogram-transformer": {
        "patch_size": 8,
        "frequency_stride": 8,
        "time_stride": 8,
        "num_mel_bins": 16,
        "max_length": 32,
    },
    "clap_audio_model": {
        "spec_size": 64,
        "num_mel_bins": 16,
        "window_size": 4,
        "patch_embeds_hidden_size": 16,
        "hidden_size": 64,
        "depths": [1, 1, 1],
        "num_attention_heads": [2, 2, 2],
        "num_hidden_layers": 3,
    },
    "data2vec-audio": {**_WAVE, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3},
    "dac": {
        "encoder_hidden_size": 8,
        "decoder_hidden_size": 16,
        "n_codebooks": 2,
        "downsampling_ratios": [2, 4],
        "upsampling_ratios": [4, 2],
        "codebook_size": 16,
    },
    "hubert": _WAVE,
    "lasr_encoder": {"num_mel_bins": 32, "subsampling_conv_channels": 16},
    "parakeet_encoder": {"num_mel_bins": 16, "subsampling_conv_channels": 8},
    "patchtsmixer": {"context_length": 32, "num_input_channels": 3, "patch_length": 8, "patch_stride": 8},
    "patchtst": {
        "context_length": 32,
        "num_input_channels": 3,
        "patch_length": 8,
        "patch_stride": 8,
        "ffn_dim": 64,
        "do_mask_input": False,
    },
    "sew": {**_WAVE, "squeeze_factor": 2},
    "sew-d": {**_WAVE, "squeeze_factor": 2, "position_buckets": 16, "max_position_embeddings": 64},
    "speech_to_text": {"input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 64},
    "unispeech": _WAVE,
    "unispeech-sat": _WAVE,
    "wav2vec2": _WAVE,
    "wav2vec2-bert": {"feature_projection_input_dim": 16},
    "wav2vec2-conformer": _WAVE,
    "wavlm": {**_WAVE, "num_buckets": 16, "max_bucket_distance": 32},
    "whisper": {"num_mel_bins": 16, "max_source_positions": 16},
    "moonshine": {"encoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "encoder_num_key_value_heads": 4},
    "univnet": {"model_hidden_channels": 8, "model_in_channels": 64, "num_mel_bins": 8},
    "voxtral_encoder": {"num_mel_bins": 16, "max_source_positions": 16},
    "qwen2_audio_encoder": {"num_mel_bins": 16, "max_source_positions": 16},
}
_SHAPES: Mapping[str, tuple[int, ...]] = {
    "textnet": (3, 64, 64),
    "timesformer": (2, 3, 32, 32),
    "videomae": (4, 3, 32, 32),
    "vivit": (4, 3, 32, 32),
    "mgp-str": (3, 32, 64),
    "glpn": (3, 64, 64),
    "mobilenet_v2": (3, 64, 64),
    "audio-spectrogram-transformer": (32, 16),
    "clap_audio_model": (1, 256, 16),
    "dac": (1, 256),
    "lasr_encoder": (64, 32),
    "parakeet_encoder": (64, 16),
    "patchtsmixer": (32, 3),
    "patchtst": (32, 3),
    "speech_to_text": (32, 16),
    "wav2vec2-bert": (24, 16),
    "whisper": (16, 32),
    "univnet": (12, 8),
    "voxtral_encoder": (16, 32),
    "qwen2_audio_encoder": (16, 32),
    "moonshine": (1024,),
}
"""Shapes of one row, where it is neither an image of `image_size` nor a wave of 480 samples."""
_ENCODERS_OF = {*_SEQ2SEQ, "speech_to_text", "whisper", "moonshine"}

_TIMM: Mapping[str, int] = {
    **_each(
        """
    beit_base_patch16_224 convmixer_768_32
""",
        32,
    ),
    **_each(
        """
    eva02_tiny_patch14_224
""",
        56,
    ),
    **_each(
        """
    botnet26t_256 caformer_s18 cait_xxs24_224 coat_lite_tiny coat_tiny convformer_s18 convit_tiny convnext_atto
    convnextv2_atto cpubone_nano cs3darknet_s csatv2 cspnext_tiny cspresnet50 davit_tiny deit_tiny_distilled_patch16_224
    densenet121 dla46x_c dpn48b edgenext_xx_small efficientformerv2_s0 efficientnet_b0 efficientvim_m1 efficientvit_b0
    efficientvit_m0 ese_vovnet19b_slim fasternet_t0 fastvit_t8 fbnetc_100 flexivit_small focalnet_tiny_srf gernet_s
    ghostnet_050 ghostnetv3_050 gmixer_12_224 gmlp_ti16_224 hardcorenas_a hgnetv2_b0 hrnet_w18_small iformer_t
    inception_next_atto lambda_resnet26t lcnet_050 lcnetv2_small legacy_seresnet18 lowformer_b0 mambaout_femto mixer_s32_224
    mixnet_s mnasnet_small mobilenetv3_small_050 mobilenetv4_conv_small_035 mobileone_s0 mobilevit_xxs mobilevitv2_050
    mvitv2_tiny nest_tiny nextvit_small nf_regnet_b0 pit_ti_224 poolformer_s12 poolformerv2_s12 pvt_v2_b0 rdnet_tiny
    regnetx_002 regnety_002 repghostnet_050 repvgg_a0 repvit_m0_9 res2net50_48w_2s resmlp_12_224 resnest14d resnet18
    resnetblur18 resnetv2_18 rexnet_100 sam2_hiera_tiny selecsls42 sequencer2d_s seresnet18 shvit_s1 skresnet18 spnasnet_100
    starnet_s1 swiftformer_xs tiny_vit_5m_224 tinynet_e tnt_s_patch16_224 tresnet_m twins_pcpvt_small twins_svt_small
    vgg11_bn visformer_tiny vit_pe_core_tiny_patch16_384 vit_small_patch16_dinov3 vit_tiny_patch16_224 vit_tiny_r_s16_p8_224
    vitamin_small_224 volo_d1_224 xcit_nano_12_p16_224
""",
        64,
    ),
    **_each(
        """
    inception_resnet_v2 inception_v3 inception_v4 legacy_xception xception41
""",
        96,
    ),
    **_each(
        """
    test_byobnet test_coatnet test_convnext test_convnext2 test_efficientnet test_efficientnet_ln test_mambaout test_maxvit
    test_nfnet test_resnet test_vit test_vit2 test_vit3 test_vit_relpos
""",
        160,
    ),
    **_each(
        """
    efficientformer_l1 gcvit_xxtiny hiera_tiny_224 levit_128s levit_conv_128s samvit_base_patch16_224
    swin_tiny_patch4_window7_224 swinv2_cr_tiny_224
""",
        224,
    ),
    **_each(
        """
    crossvit_tiny_240
""",
        240,
    ),
    **_each(
        """
    eca_halonext26ts halonet26t swinv2_tiny_window8_256
""",
        256,
    ),
}
"""Models of timm and the size of their images."""
_TORCHVISION: Mapping[str, int] = {
    **_each(
        """
    mc3_18 r2plus1d_18 r3d_18 swin3d_t
""",
        32,
    ),
    **_each(
        """
    alexnet convnext_tiny deeplabv3_mobilenet_v3_large deeplabv3_resnet50 densenet121 efficientnet_b0 efficientnet_v2_s
    fcn_resnet50 googlenet lraspp_mobilenet_v3_large mnasnet0_5 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small
    regnet_x_400mf regnet_y_400mf resnet18 resnet50 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_0 squeezenet1_1 swin_t
    swin_v2_t vgg11 vgg11_bn vit_b_32 wide_resnet50_2
""",
        64,
    ),
    **_each(
        """
    inception_v3
""",
        96,
    ),
    **_each(
        """
    maxvit_t
""",
        224,
    ),
}
_FRAMES = {"mc3_18": 4, "r2plus1d_18": 4, "r3d_18": 4, "swin3d_t": 4}


def entries() -> list[Entry]:
    """All modules, in the order of the table."""
    groups = {
        "text encoder": _TEXT,
        "encoder of a translator": _SEQ2SEQ,
        "decoder": _DECODERS,
        "vision": _VISION,
        "audio and series": _AUDIO,
    }
    found = [
        Entry(f"transformers, {kind}", name, lambda name=name, given=given: _transformers(name, given))
        for kind, group in groups.items()
        for name, given in sorted(group.items())
    ]
    found += [Entry("timm", name, lambda name=name: _timm(name)) for name in sorted(_TIMM)]
    return found + [Entry("torchvision", name, lambda name=name: _torchvision(name)) for name in sorted(_TORCHVISION)]


def _transformers(model_type: str, given: Mapping[str, Any]) -> tuple[nn.Module, Inputs]:
    """A module of transformers: the base model of a configuration, or its encoder."""
    import inspect

    from transformers import AutoModel

    config = _config(model_type, given)
    model: Any = (
        AutoModel.from_config(config) if type(config) in AutoModel._model_mapping else _model_class(config)(config)
    )
    if model_type in _ENCODERS_OF:
        model = model.get_encoder()
    first, second = [*inspect.signature(model.forward).parameters, ""][:2]
    if model_type in {**_TEXT, **_SEQ2SEQ, **_DECODERS}:
        return model, lambda batch: _tokens(batch, first, second)
    size = getattr(config, "image_size", 480)
    image = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    default = (3, *image) if first == "pixel_values" else (480,)
    return model, lambda batch: {first: torch.randn(batch, *_SHAPES.get(model_type, default))}


def _config(model_type: str, given: Mapping[str, Any]) -> Any:
    """The configuration of a model type with small sizes."""
    import transformers
    from transformers import CONFIG_MAPPING

    names = {
        "blip_vision_model": "BlipVisionConfig",
        "siglip_text_model": "SiglipTextConfig",
        "clap_audio_model": "ClapAudioConfig",
    }
    cls = getattr(transformers, names[model_type]) if model_type in names else CONFIG_MAPPING[model_type]
    default = cls()
    small = {name: value for name, value in _SMALL.items() if hasattr(default, name)}
    return cls(**{name: value for name, value in {**small, **given}.items() if value is not None})


def _model_class(config: Any) -> Any:
    import transformers

    return getattr(transformers, type(config).__name__.removesuffix("Config") + "Model")


def _tokens(batch: int, first: str, second: str) -> dict[str, Tensor]:
    """Token ids, and a mask of rows of different lengths where forward takes one next."""
    inputs = {first: torch.randint(3, 99, (batch, _LENGTH))}
    if second == "attention_mask":
        lengths = torch.randint(_LENGTH // 2, _LENGTH + 1, (batch, 1))
        inputs[second] = (torch.arange(_LENGTH) < lengths).long()
    return inputs


def _timm(name: str) -> tuple[nn.Module, Inputs]:
    import timm

    size = _TIMM[name]
    try:
        model = timm.create_model(name, pretrained=False, num_classes=10, img_size=size)
    except TypeError:  # a CNN has no img_size
        model = timm.create_model(name, pretrained=False, num_classes=10)
    return model, _images(model, 3, size, size)


def _torchvision(name: str) -> tuple[nn.Module, Inputs]:
    from torchvision.models import get_model

    size, given = _TORCHVISION[name], {}
    if name.startswith(("deeplab", "fcn", "lraspp")):
        given = {"weights_backbone": None}
    elif name in ("googlenet", "inception_v3"):
        given = {"aux_logits": False, "init_weights": False}
    elif name.startswith("vit"):
        given = {"image_size": size}
    model = get_model(name, weights=None, **given)
    return model, _images(model, 3, *((_FRAMES[name],) if name in _FRAMES else ()), size, size)


def _images(model: nn.Module, *shape: int) -> Inputs:
    import inspect

    first = next(iter(inspect.signature(model.forward).parameters))
    return lambda batch: {first: torch.randn(batch, *shape)}
