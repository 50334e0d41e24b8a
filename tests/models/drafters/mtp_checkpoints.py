"""Tiny checkpoints with a multi-token-prediction (MTP) layer in their published forms, and what transformers' `MtpModel` drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_layers
from safetensors.torch import load_file, save_file

from torchweave.models.materialize import quiet_transformers
from torchweave.verify import zoo

needs_mtp = pytest.mark.skipif(
    not hasattr(transformers.modeling_layers, "MtpModel"), reason="this transformers has no MTP layers"
)
MODELS = {
    "mellum": {"num_mtp_layers": 1},  # attention of few heads in windows, experts, `mtp.`
    "glm4_moe": {},  # attention of few heads, experts, `model.layers.N.`
    "deepseek_v3": {},  # latent attention, experts, `model.layers.N.`
}
_MODULES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}


def write_checkpoint(folder: Path, name: str, layer: bool = True, seed: int = 0, **config: Any) -> Path:
    """Write a model of the zoo, with the tensors of an MTP layer if `layer` is set."""
    entry = zoo.zoo_model(name)
    model = zoo.build(replace(entry, options=entry.options | MODELS[name] | config), seed)
    zoo.save(model, folder)
    if layer:
        file = folder / "model.safetensors"
        save_file(load_file(file) | mtp_tensors(model, name, seed + 1), file, {"format": "pt"})
    return folder


def mtp_tensors(model: Any, name: str, seed: int) -> dict[str, torch.Tensor]:
    """Random weights of an MTP layer by their published names, each expert by itself."""
    from transformers.modeling_layers import MtpModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = MtpModel(model, 1).layers[0]
        zoo.perturb_weights(layer)
    tensors: dict[str, torch.Tensor] = {}
    for each, tensor in layer.state_dict().items():
        each = each.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if not each.startswith("mlp.experts."):
            tensors[each] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = {"gate_proj": matrix.chunk(2)[0], "up_proj": matrix.chunk(2)[1]}
            parts = parts if each.endswith("gate_up_proj") else {"down_proj": matrix}
            tensors |= {f"mlp.experts.{expert}.{part}.weight": value for part, value in parts.items()}
    number = model.config.num_hidden_layers
    if name != "mellum":
        copies = {"embed_tokens": model.get_input_embeddings(), "shared_head.head": model.get_output_embeddings()}
        tensors |= {f"{each}.weight": module.weight.clone() for each, module in copies.items()}
        return {f"model.layers.{number}.{each}": tensor.contiguous() for each, tensor in tensors.items()}
    found = {}
    for each, tensor in tensors.items():
        module = each.removesuffix(".weight")
        new = f"mtp.{_MODULES[module]}.weight" if module in _MODULES else f"mtp.layers.0.{each}"
        found[new] = tensor.contiguous()
    return found


def transformers_models(folder: Path) -> tuple[Any, Any]:
    """transformers' own model of a checkpoint and its `MtpModel`, in float32."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        if model.config.model_type != "mellum":  # its pattern has the number of layers of the published models
            model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}.*"]
        return model.eval(), MtpModel.from_pretrained(model).eval()


@torch.no_grad()
def reference_drafts(model: Any, mtp: Any, tokens: list[int], num_drafts: int) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy drafts behind `tokens`, and the logits of each: the first as transformers drafts, the others by the layer again."""
    from transformers.cache_utils import MtpCache

    ids = torch.tensor([tokens])
    hidden = model(input_ids=ids[:, :-1], output_hidden_states=True, use_cache=False).hidden_states[-1]
    cache, positions = MtpCache(config=model.config.get_mtp_config()), torch.arange(1, len(tokens))[None]
    drafts, logits, ids = [], [], ids[:, 1:]
    for _ in range(num_drafts):
        hidden = mtp.forward_layer(0, hidden, positions, cache, input_ids=ids)[:, -1:]
        logits.append(mtp._project_to_logits(hidden)[0, 0])
        drafts.append(int(logits[-1].argmax()))
        ids, positions = torch.tensor([drafts[-1:]]), positions[:, -1:] + 1
    return drafts, logits
