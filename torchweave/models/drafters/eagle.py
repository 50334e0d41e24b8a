"""EAGLE-3 heads: one decoder layer that drafts from a model's own hidden states (arXiv 2503.01840).

The head computes position t from the model's hidden states there and the embedding of token t + 1, and predicts token t + 2:

    hidden[t] = fc(concat of the model's hidden states after some of its layers)      (`HiddenStates`, in the model's graph)
    x = concat(norm(embed(token[t + 1])), norm(hidden[t]))                            2 H wide
    y = hidden[t] + attention(x);  y = y + mlp(norm(y));  logits = lm_head(norm(y))

Further drafts take `y` of the draft before instead of the model's hidden states. The head may predict a part of the vocabulary:
`d2t[i]` is what is added to its id i.

Two published forms are loaded, which differ in their config and in the layer's name: that of `speculators` (`layers.0.`), and that
of EAGLE, SGLang and SpecForge (`midlayer.`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from torchweave.config.model_source import is_eagle_head, read_json
from torchweave.models import attention
from torchweave.models.decoder import DecoderStep, HiddenStates
from torchweave.models.drafters.head import DraftHead
from torchweave.models.hooks.rope import freeze_rope
from torchweave.models.multimodal.support import decoder_of, text_config
from torchweave.models.parallel.apply import plain_embedding
from torchweave.models.weights import read as weights
from torchweave.ops.attention.op import LayerSpec, hidden_state_layer
from torchweave.report import Report

_LAYERS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen3": (Qwen3DecoderLayer, Qwen3RotaryEmbedding),
}
_UNSUPPORTED = ("fc_norm", "norm_output", "parallel_drafting")
"""Settings of later heads that change what is computed."""
_TAKEN = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class EagleConfig:
    """Config of an EAGLE-3 head.

    Attributes:
        layer: transformers' config of its layer.
        norm_before_residual: the residual is the normed hidden state.
        norm_before_fc: the model's hidden states are normed before `fc`.
        taken: the model's hidden states after so many layers are concatenated; None: the usual three (`default_taken`).
    """

    layer: Any
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    taken: tuple[int, ...] | None = None


def default_taken(num_layers: int) -> tuple[int, ...]:
    """The hidden states that heads take which name none: near the beginning, in the middle, near the end."""
    return 2, num_layers // 2, num_layers - 3


def read_eagle_config(folder: Path) -> EagleConfig:
    """Read the config of a head in either form.

    Raises:
        ValueError: the folder is no EAGLE-3 head, or one of another kind than is supported.
    """
    raw = read_json(folder / "config.json")
    names = [name for name in raw.get("architectures") or () if isinstance(name, str)]
    if not is_eagle_head(raw):
        kind = raw.get("speculators_model_type") or ", ".join(names) or "no architecture"
        raise ValueError(
            f"{folder} is no EAGLE-3 head, but has {kind}; give a folder whose config.json has speculators_model_type=eagle3 or an "
            "architecture such as LlamaForCausalLMEagle3"
        )
    if "speculators_model_type" in raw:
        layer = raw.get("transformer_layer_config")
    else:
        layer = {name: value for name, value in raw.items() if name not in ("architectures", "eagle_config")}
    model_type = layer.get("model_type", "llama") if isinstance(layer, dict) else None
    if model_type not in _LAYERS:
        raise ValueError(f"The head {folder} has a layer of {model_type}; those of {', '.join(_LAYERS)} are supported")
    assert isinstance(layer, dict)
    if changed := [name for name in _UNSUPPORTED if raw.get(name)]:
        raise ValueError(f"The head {folder} has {changed[0]}={raw[changed[0]]}, which is not supported")
    if layer.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"The head {folder} has {layer['num_hidden_layers']} layers; heads of one layer are supported")
    try:
        config = AutoConfig.for_model(model_type, **{key: value for key, value in layer.items() if key != "model_type"})
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"The config of the head {folder} is not valid: {' '.join(str(error).split())[:200]}"
        ) from error
    # The layer sees all positions: a config that was copied from a model may have its windows.
    config.layer_types, config.sliding_window = None, None
    if config.rope_parameters.get("rope_type") == "mrope":
        # Of a model with images: a head rotates by one position a token, and then all axes are equal.
        config.rope_parameters = config.rope_parameters | {"rope_type": "default"}
    nested, taken = raw.get("eagle_config") or {}, raw.get(_TAKEN)
    if taken is None and nested.get(_TAKEN):
        taken = [number + 1 for number in nested[_TAKEN]]  # there, the number of the layer whose output is taken
    return EagleConfig(
        config,
        bool(raw.get("norm_before_residual")),
        bool(raw.get("norm_before_fc")),
        tuple(taken) if taken else None,
    )


class EagleHead(DraftHead):
    """An EAGLE-3 head; over several ranks each has all of it.

    Args:
        config: of the head.
        tensors: its weights by their names in `speculators`.
        embedding: the model's, which it reads where it has none of its own.
        vocab_size: V of the model.
        max_model_len: longest sequence in tokens.
    """

    def __init__(
        self,
        config: EagleConfig,
        tensors: dict[str, Tensor],
        embedding: nn.Embedding,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        nn.Module.__init__(self)
        layer, device = config.layer, embedding.weight.device
        layer._attn_implementation = attention.NAME
        make_layer, make_rope = _LAYERS[layer.model_type]
        self.hidden_states, self.recurrent_layers = None, ()
        self.input_hidden_size, self.vocab_size, self.max_model_len = int(layer.hidden_size), vocab_size, max_model_len
        self._norm_before_residual = config.norm_before_residual
        with torch.device("meta"):
            self.layers = nn.ModuleList([make_layer(layer, 0)])
            first: Any = self.layers[0]
            make_norm, eps = type(first.input_layernorm), layer.rms_norm_eps
            first.hidden_norm, self.norm = (make_norm(layer.hidden_size, eps=eps) for _ in range(2))
            for name in ("q_proj", "k_proj", "v_proj"):
                narrow = getattr(first.self_attn, name)
                wide = nn.Linear(2 * layer.hidden_size, narrow.out_features, bias=narrow.bias is not None)
                setattr(first.self_attn, name, wide)
            self.lm_head = nn.Linear(layer.hidden_size, len(tensors["lm_head.weight"]), bias=False)
            self.fc = nn.Linear(tensors["fc.weight"].shape[1], layer.hidden_size, bias="fc.bias" in tensors)
            self.input_norm = make_norm(self.fc.in_features, eps=eps) if config.norm_before_fc else None
        own = tensors.pop("embed_tokens.weight", None)
        self.embed_tokens = (
            plain_embedding(embedding) if own is None else nn.Embedding(len(own), own.shape[1], _weight=own)
        )
        offsets = tensors.pop("d2t", None)
        self.register_buffer(
            "targets", None if offsets is None else offsets + torch.arange(len(offsets), device=device)
        )
        self.load_state_dict(tensors | {"embed_tokens.weight": self.embed_tokens.weight}, strict=False, assign=True)
        self.rotary_emb = make_rope(layer).to(device)
        freeze_rope(self, max_model_len, Report(show=False))
        self.requires_grad_(False)
        heads, dim = layer.num_attention_heads, first.self_attn.head_dim
        self.attention_layers = [
            LayerSpec(layer.num_key_value_heads, dim, dim, heads),
            hidden_state_layer(self.input_hidden_size),
        ]

    @property
    def combine(self) -> nn.Module:
        """Maps the model's concatenated hidden states to this head's input."""
        return nn.Sequential(*(each for each in (self.input_norm, self.fc) if each is not None))

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_index: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `DraftHead`; logits are -inf for tokens that the head does not predict, the model's hidden states are combined."""
        layer: Any = self.layers[0]
        residual, normed = hidden[None], layer.hidden_norm(hidden[None])
        if self._norm_before_residual:
            residual = normed
        both = torch.cat([layer.input_layernorm(self.embed_tokens(input_ids)[None]), normed], -1)
        rotation = self.rotary_emb(normed, positions[None])
        result, _ = layer.self_attn(hidden_states=both, position_embeddings=rotation, attention_mask=None)
        # The keys and values of the others are written: nothing else of them is read.
        out = (residual + result)[:, logits_index]
        out = (out + layer.mlp(layer.post_attention_layernorm(out)))[0]
        logits = self.lm_head(self.norm(out))
        if self.targets is not None:
            everything = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
            logits = everything.index_copy(1, self.targets, logits)
        return logits, out


def load_eagle_head(folder: Path, target: DecoderStep, dtype: torch.dtype, max_model_len: int) -> EagleHead:
    """Load the head of a folder, and let `target` compute the hidden states that it takes.

    Raises:
        ValueError: the folder is damaged, or its head is not one for `target`.
    """
    config, model = read_eagle_config(folder), target.model
    decoder, width = decoder_of(model), text_config(model).hidden_size
    layers = _decoder_layers(decoder, text_config(model).num_hidden_layers)
    taken = config.taken or default_taken(len(layers))
    if not all(isinstance(number, int) and 1 <= number <= len(layers) for number in taken):
        raise ValueError(
            f"The head {folder} takes hidden states after layers {list(taken)}, but the model has {len(layers)}"
        )
    embedding: Any = model.get_input_embeddings()
    tensors = _read_tensors(folder, embedding.weight.device, dtype)
    own = tensors.get("embed_tokens.weight")
    # Over several ranks each has a part of the model's embeddings, of the same width.
    rows = target.vocab_size if own is None else len(own)
    _check(
        folder,
        config,
        tensors,
        width,
        (rows, (embedding.weight if own is None else own).shape[1]),
        len(taken),
        target.vocab_size,
    )
    if own is not None and own.shape == embedding.weight.shape and own.equal(embedding.weight):
        del tensors["embed_tokens.weight"]  # a copy of the model's
    head = EagleHead(config, tensors, embedding, target.vocab_size, max_model_len)
    if missing := [name for name, tensor in head.state_dict().items() if tensor.is_meta]:
        raise ValueError(f"The head {folder} lacks {missing[0]}; copy or download it again")
    target.hidden_states = HiddenStates(layers, taken, head.combine)
    return head


def _decoder_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ValueError(
        f"{type(decoder).__name__} has no list of its {num_layers} layers, whose outputs a draft head takes"
    )


def _read_tensors(folder: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a head by their names in `speculators`."""
    stored = weights.read_tensors(weights.read_headers(folder))
    named = {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor.to(
            device, dtype if tensor.is_floating_point() else None
        )
        for name, tensor in stored
    }
    return {name: tensor for name, tensor in named.items() if name != "t2d" and not name.startswith("verifier_")}


def _check(
    folder: Path,
    config: EagleConfig,
    tensors: dict[str, Tensor],
    width: int,
    embedding: tuple[int, int],
    num_taken: int,
    vocab_size: int,
) -> None:
    """Reject a head that lacks tensors, or whose sizes are not the model's."""
    if missing := [name for name in ("fc.weight", "lm_head.weight") if name not in tensors]:
        raise ValueError(f"The head {folder} lacks {missing[0]}; copy or download it again")
    taken, hidden_size = tensors["fc.weight"].shape[1], config.layer.hidden_size
    if taken != num_taken * width:
        raise ValueError(
            f"The head {folder} takes {taken} channels, but {num_taken} hidden states of the model have {num_taken * width}; "
            "choose a head that was trained for this model"
        )
    rows, channels = embedding
    if channels != hidden_size or rows < vocab_size:
        raise ValueError(
            f"The head {folder} needs embeddings of {vocab_size} tokens with {hidden_size} channels, but they are "
            f"[{rows}, {channels}]"
        )
    predicted, offsets = len(tensors["lm_head.weight"]), tensors.get("d2t")
    if offsets is None and predicted != vocab_size:
        raise ValueError(
            f"The head {folder} predicts {predicted} of {vocab_size} tokens, but has no d2t that names them"
        )
    if offsets is not None:
        ids = offsets.cpu() + torch.arange(len(offsets))
        if len(ids) != predicted or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise ValueError(
                f"d2t of the head {folder} does not map its {predicted} tokens into the model's {vocab_size}"
            )
