"""Multi-token-prediction (MTP) layers: a further decoder layer of the checkpoint that drafts from the model's last hidden states.

The layer computes position t from the model's last hidden state there, after the final norm, and the embedding of token t + 1, and
predicts token t + 2, as transformers' `MtpModel` does (arXiv 2412.19437, section 2.2):

    x = eh_proj(concat(enorm(embed(token[t + 1])), hnorm(hidden[t])))        rotated by position t + 1
    y = norm(layer(x));  logits = lm_head(y)

Further drafts take `y` of the draft before instead of the model's hidden state.

So an MTP layer is a model of the target's own class with one layer, which is given `x` instead of embeddings, and three further
modules. It is built, adapted, sharded and loaded as the target is; embeddings and head are the target's modules.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from torchweave.config.model_source import Source
from torchweave.models.adapt import adapt
from torchweave.models.attention import UnsupportedModel
from torchweave.models.decoder import HiddenStates
from torchweave.models.drafters.head import DraftHead
from torchweave.models.hooks.rope import freeze_rope
from torchweave.models.load import LoadedModel, build_on_meta, read_config, with_cache_scales
from torchweave.models.materialize import WeightLoadSpec, load_dummy_weights, load_weights
from torchweave.models.parallel import shard_model
from torchweave.models.weights import read as weights
from torchweave.models.weights.merge_experts import plan_expert_merge
from torchweave.models.weights.mtp_tensors import as_model_of_one_layer, count_mtp_layers, split_mtp_tensors
from torchweave.models.weights.quantized_checkpoint import resolve_scheme
from torchweave.ops.attention.op import LayerSpec, hidden_state_layer
from torchweave.report import Report


class MtpHead(DraftHead):
    """An MTP layer.

    Args:
        model: of the target's class, with one layer; its base model has `enorm`, `hnorm` and `eh_proj`.
        attention_layers: of `model`.
        vocab_size: V of the target.
        max_model_len: longest sequence in tokens.
        num_parameters: of the layer over all ranks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention_layers: list[LayerSpec],
        vocab_size: int,
        max_model_len: int,
        num_parameters: int,
    ) -> None:
        self.num_parameters = num_parameters
        self.input_hidden_size = int(model.config.hidden_size)
        layers = [*attention_layers, hidden_state_layer(self.input_hidden_size)]
        super().__init__(model, layers, vocab_size, max_model_len)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that are not the target's."""
        shared: Any = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        others = {id(tensor) for module in shared for tensor in _tensors(module)}
        return sum(tensor.nbytes for tensor in _tensors(self.model) if id(tensor) not in others)

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_index: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `DraftHead`; the model's hidden states are its last ones."""
        base: Any = self.model.base_model
        both = torch.cat([base.enorm(base.embed_tokens(input_ids)), base.hnorm(hidden)], -1)
        given = {"inputs_embeds": base.eh_proj(both)[None], "position_ids": (positions + 1)[None], "use_cache": False}
        out = base(**given).last_hidden_state[0][logits_index]
        return self.model.lm_head(out)[:, : self.vocab_size], out  # type: ignore[operator]


def load_mtp_head(
    target: LoadedModel,
    source: Source,
    load_format: str = "auto",
    trust_remote_code: bool = False,
    quantization: str | None = None,
    expert_parallel: bool = False,
) -> MtpHead:
    """Load the MTP layer of a model's checkpoint, and let the model return its last hidden states.

    Args:
        source: of `target`; the options are those it was loaded with.

    Raises:
        ValueError: the checkpoint has no MTP layer, or one that is not supported.
    """
    quiet = Report(show=False)  # events and stages of loading are about the model
    config = _mtp_config(read_config(source, trust_remote_code), target.name)
    stored = None if load_format == "dummy" else _read_tensors(target, source)
    scheme, groups = resolve_scheme(source, quantization), target.process_groups
    model = build_on_meta(config, target.dtype, trust_remote_code)
    layers = adapt(model, quiet)
    if len(layers.attention) != 1 or layers.recurrent or layers.attention[0].sparse:
        raise UnsupportedModel(f"the MTP layer of {target.name} keeps more than keys and values of tokens")
    num_parameters, plan = _add_modules(model), None
    if groups.tensor_parallel_size > 1:
        plan, layers = shard_model(model, layers, groups, expert_parallel, quiet)
    spec = WeightLoadSpec(source, config, target.dtype, target.device, trust_remote_code, scheme, plan)
    if stored is None:
        load_dummy_weights(model, spec, quiet)
        _share(model, target)
    else:
        layers = with_cache_scales(layers, stored, quiet)
        _share(model, target)
        if weights.needs_conversion(model, stored) and plan_expert_merge(model, stored) is None:
            raise UnsupportedModel(f"the MTP layer of {target.name} is stored in a form that is not supported")
        model, _ = load_weights(model, stored, spec, quiet)
    freeze_rope(model, target.max_model_len, quiet)
    module = target.module
    head = MtpHead(model, layers.attention, module.vocab_size, target.max_model_len, num_parameters)
    module.hidden_states = HiddenStates([module.model.base_model], (1,), nn.Identity())
    return head.eval().requires_grad_(False)


def _mtp_config(config: PreTrainedConfig, name: str) -> PreTrainedConfig:
    """Config of a model whose only layer is the MTP layer."""
    if not hasattr(config, "get_mtp_config"):
        raise ValueError(f"transformers {transformers.__version__} has no MTP layers; update transformers to 5.24")
    if getattr(config, "num_mtp_layers", None) is None:
        raise ValueError(f"transformers {transformers.__version__} has no MTP layers of {config.model_type} ({name})")
    if config.num_mtp_layers != 1:
        raise ValueError(
            f"the config of {name} has {config.num_mtp_layers} MTP layers; checkpoints of one MTP layer are supported"
        )
    if getattr(config, "layer_types", None) is not None and getattr(config, "mtp_layer_types", None) is None:
        raise ValueError(
            f"transformers {transformers.__version__} does not tell the kind of the MTP layer of {config.model_type} ({name})"
        )
    return config.get_mtp_config()


def _read_tensors(target: LoadedModel, source: Source) -> dict[str, weights.CheckpointTensor]:
    """The tensors of the MTP layer by their names in a model of one layer."""
    assert source.folder is not None, "`load` has read it"
    stored = weights.read_headers(source.folder)
    _, mtp = split_mtp_tensors(stored, target.module.model.config.num_hidden_layers)
    if not mtp:
        raise ValueError(f"the checkpoint of {target.name} has no MTP layer; choose one with it, or another method")
    if (count := count_mtp_layers(mtp)) != 1:
        raise ValueError(
            f"the checkpoint of {target.name} has {count} MTP layers; checkpoints of one MTP layer are supported"
        )
    return as_model_of_one_layer(mtp)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _add_modules(model: PreTrainedModel) -> int:
    """Add the modules that make the layer's input to the base model, on the meta device; returns the layer's parameters."""
    base: Any = model.base_model
    size, make_norm, dtype = model.config.hidden_size, type(base.norm), base.norm.weight.dtype
    with torch.device("meta"):
        for name in ("enorm", "hnorm"):
            setattr(base, name, make_norm(size, eps=model.config.rms_norm_eps).to(dtype))
        base.add_module("eh_proj", nn.Linear(2 * size, size, bias=False, dtype=dtype))
    base.requires_grad_(False)
    own = (base.layers, base.norm, base.enorm, base.hnorm, base.eh_proj)
    return sum(parameter.numel() for module in own for parameter in module.parameters())


def _share(model: PreTrainedModel, target: LoadedModel) -> None:
    """Give the model the target's embeddings and head, which its checkpoint tensors lack."""
    own = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if module in own]
    model._keys_to_ignore_on_load_missing = [rf"^{re.escape(name)}\." for name in names]
    model.set_input_embeddings(target.module.model.get_input_embeddings())
    model.set_output_embeddings(target.module.model.get_output_embeddings())
