"""Checkpoints with packed integers, written as the published formats define them, and the numbers that they stand for.

Written element by element and apart from the package: nothing here imports its layouts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Sizes of e2m1."""


@dataclass(frozen=True)
class Form:
    """A published form: how it packs, and its settings.

    Attributes:
        method: `ct` (compressed-tensors; pack-quantized, or the version), `awq`, `gptq` or `modelopt`.
        group: inputs that share a scale; -1: all.
        ordered: inputs belong to groups by an index.
        version: of the format.
        tokens: activations are rounded to 8 bits, token by token.
    """

    method: str
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    ordered: bool = False
    version: str = "gptq"
    tokens: bool = False

    @property
    def code(self) -> str:
        """`int`, or the format of e2m1 numbers."""
        return self.version.removesuffix("-pack-quantized") if "fp4" in self.version else "int"

    @property
    def config(self) -> dict[str, Any]:
        """The `quantization_config`."""
        if self.method == "awq":
            return {
                "quant_method": "awq", "bits": 4, "group_size": self.group, "version": "gemm", "zero_point": True,
                "modules_to_not_convert": ["lm_head"],
            }  # fmt: skip
        if self.method == "gptq":
            return {
                "quant_method": "gptq", "bits": self.bits, "group_size": self.group, "desc_act": self.ordered,
                "sym": self.symmetric, "checkpoint_format": self.version, "lm_head": False, "dynamic": {"-:.*visual.*": {}},
            }  # fmt: skip
        if self.method == "modelopt":
            return {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "group_size": 16}
        if self.code != "int":
            numbers = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": self.group}
            numbers["strategy"] = "tensor_group" if self.code == "nvfp4" else "group"
            inputs = numbers | {"dynamic": "local"} if self.code == "nvfp4" else None
            return {
                "quant_method": "compressed-tensors", "format": self.version, "ignore": ["lm_head"],
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers, "input_activations": inputs}},
            }  # fmt: skip
        weights: dict[str, Any] = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "dynamic": False}
        weights |= {"strategy": "channel"} if self.group == -1 else {"strategy": "group", "group_size": self.group}
        weights["actorder"] = "group" if self.ordered else None
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        if self.version == "int-quantized":
            group["input_activations"] = {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token" if self.tokens else "tensor",
                "dynamic": self.tokens,
            }
        return {
            "quant_method": "compressed-tensors",
            "format": self.version if self.version == "int-quantized" else "pack-quantized", "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "quantization_status": "compressed",
        }  # fmt: skip


FORMS = {
    "ct-int4-group": Form("ct"),
    "ct-int4-group-asymmetric": Form("ct", symmetric=False),
    "ct-int4-channel": Form("ct", group=-1),
    "ct-int4-channel-asymmetric": Form("ct", group=-1, symmetric=False),
    "ct-int4-actorder": Form("ct", ordered=True),
    "ct-int8-channel": Form("ct", bits=8, group=-1),
    "ct-int8-group-asymmetric": Form("ct", bits=8, symmetric=False),
    "ct-int8-w8a8": Form("ct", bits=8, group=-1, version="int-quantized"),
    "awq": Form("awq", symmetric=False),
    "awq-channel": Form("awq", group=-1, symmetric=False),
    "gptq-int4": Form("gptq"),
    "gptq-int4-asymmetric": Form("gptq", symmetric=False),
    "gptq-int4-desc-act": Form("gptq", symmetric=False, ordered=True),
    "gptq-int4-channel": Form("gptq", group=-1),
    "gptq-int8": Form("gptq", bits=8),
    "gptq-int8-desc-act": Form("gptq", bits=8, ordered=True),
    "gptq-v2-int4": Form("gptq", symmetric=False, version="gptq_v2"),
    "ct-nvfp4": Form("ct", group=16, version="nvfp4-pack-quantized"),
    "ct-mxfp4": Form("ct", group=32, version="mxfp4-pack-quantized"),
    "modelopt-nvfp4": Form("modelopt", group=16, version="nvfp4"),
}


@dataclass(frozen=True)
class Integers:
    """A quantized weight: q `[N, K]`, scale and zero `[N, G]`, the group of each input `[K]`."""

    q: Tensor
    scale: Tensor
    zero: Tensor
    index: Tensor

    def values(self) -> Tensor:
        index = self.index.long()
        return (self.q - self.zero[:, index]).float() * self.scale[:, index].float()


def quantize(weight: Tensor, form: Form, seed: int) -> Integers:
    """Round to the nearest, with zero points from 1 (a zero point of 0 cannot be stored as v1 of GPTQ stores them)."""
    rows, width = weight.shape
    size = width if form.group == -1 else form.group
    groups, top = -(-width // size), 2**form.bits - 1
    index = torch.arange(width) // size
    if form.ordered:
        index = index[torch.randperm(width, generator=torch.Generator().manual_seed(seed))]
    scale, zero = torch.empty(rows, groups), torch.full((rows, groups), 2 ** (form.bits - 1))
    for group in range(groups):
        part = weight[:, index == group]
        if form.symmetric:
            scale[:, group] = part.abs().amax(1) / (2 ** (form.bits - 1) - 0.5)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale[:, group] = (high - low) / top
            zero[:, group] = (-low / scale[:, group]).round().clamp(1, top).int()
    scale = scale.to(torch.float16)
    q = (weight / scale.float()[:, index]).round() + zero[:, index]
    return Integers(q.clamp(0, top).int(), scale, zero.int(), index.int())


@dataclass(frozen=True)
class Fp4Numbers:
    """A weight of e2m1 numbers: codes `[N, K]`, a scale for each group as the checkpoint has it, and one of the whole weight."""

    codes: Tensor
    scale: Tensor
    whole: float

    def values(self) -> Tensor:
        by = (
            torch.exp2(self.scale.float() - 127) if self.scale.dtype == torch.uint8 else self.scale.float() * self.whole
        )
        sign = 1 - 2 * (self.codes // 8).float()
        return CODES[self.codes.long() % 8] * sign * by.repeat_interleave(self.codes.shape[1] // by.shape[1], 1)


def quantize_fp4(weight: Tensor, form: Form) -> Fp4Numbers:
    """Round to the nearest e2m1 number, with scales that map the largest number of a group near to 6."""
    groups = weight.unflatten(1, (-1, form.group))
    size, whole = groups.abs().amax(2), 1.0
    if form.code == "mxfp4":
        scale = (size.log2().floor() - 2 + 127).clamp(0, 254).to(torch.uint8)
        by = torch.exp2(scale.float() - 127)
    else:
        whole = float(weight.abs().amax() / (6 * 448))
        scale = (size / 6 / whole).to(torch.float8_e4m3fn)
        by = scale.float() * whole
    scaled = groups / by[..., None]
    codes = (scaled.abs()[..., None] - CODES).abs().argmin(-1) + 8 * (scaled < 0)
    return Fp4Numbers(codes.flatten(1).to(torch.uint8), scale, whole)


def fp4_tensors_of(name: str, made: Fp4Numbers, form: Form) -> dict[str, Tensor]:
    """What a checkpoint stores for the linear `name`: the even input in the low half of a byte."""
    packed = made.codes[:, ::2] + 16 * made.codes[:, 1::2]
    whole = torch.tensor(made.whole)
    if form.method == "modelopt":
        found = {
            "weight": packed,
            "weight_scale": made.scale,
            "weight_scale_2": whole,
            "input_scale": torch.tensor(0.1),
        }
    else:
        found = {"weight_packed": packed, "weight_scale": made.scale}
        if form.code == "nvfp4":
            found |= {"weight_global_scale": (1 / whole)[None], "input_global_scale": torch.tensor([3.0])}
    return {f"{name}.{leaf}": tensor for leaf, tensor in found.items()}


def pack(values: Tensor, bits: int, dim: int, order: list[int] | None = None) -> Tensor:
    """int32 of 32 / bits neighbors of `values` along a dimension, padded with zeros; the first (or order[0]) lowest."""
    per = 32 // bits
    columns = values.movedim(dim, -1).to(torch.int64)
    columns = torch.nn.functional.pad(columns, (0, -columns.shape[-1] % per)).unflatten(-1, (-1, per))
    packed = torch.zeros(columns.shape[:-1], dtype=torch.int64)
    for place, which in enumerate(order or range(per)):
        packed += columns[..., which] << (bits * place)
    signed = torch.where(packed >= 2**31, packed - 2**32, packed)
    return signed.to(torch.int32).movedim(-1, dim).contiguous()


def tensors_of(name: str, made: Integers, form: Form) -> dict[str, Tensor]:
    """What a checkpoint stores for the linear `name`."""
    if form.version == "int-quantized":
        found = {"weight": (made.q - 128).to(torch.int8), "weight_scale": made.scale.bfloat16()}
    elif form.method == "ct":
        found = {"weight_packed": pack(made.q, form.bits, 1), "weight_scale": made.scale.bfloat16()}
        found["weight_shape"] = torch.tensor(made.q.shape)
        if not form.symmetric:
            found["weight_zero_point"] = pack(made.zero, form.bits, 0)
        if form.ordered:
            found["weight_g_idx"] = made.index
    elif form.method == "awq":
        found = {
            "qweight": pack(made.q.t(), 4, 1, AWQ_ORDER),
            "qzeros": pack(made.zero.t(), 4, 1, AWQ_ORDER),
            "scales": made.scale.t().contiguous(),
        }
    else:
        stored = made.zero if form.version == "gptq_v2" else made.zero - 1
        found = {
            "qweight": pack(made.q.t(), form.bits, 0),
            "qzeros": pack(stored.t(), form.bits, 1),
            "scales": made.scale.t().contiguous(),
            "g_idx": made.index,
        }
    return {f"{name}.{leaf}": tensor for leaf, tensor in found.items()}


def tensors_and_values(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    """What a checkpoint stores for the linear `name`, and the numbers that it stands for."""
    if form.code != "int":
        numbers = quantize_fp4(weight, form)
        return fp4_tensors_of(name, numbers, form), numbers.values()
    made = quantize(weight, form, order_seed(name))
    if form.method == "ct":
        made = Integers(made.q, made.scale.bfloat16(), made.zero, made.index)
    return tensors_of(name, made, form), made.values()


def order_seed(name: str) -> int:
    """Linears that read one input have one order of inputs, as it is the order of that input's activations."""
    reads = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "qkv_proj": 0, "o_proj": 1, "down_proj": 2}
    layer = re.search(r"\.(\d+)\.", name)
    return 4 * int(layer[1] if layer else 0) + reads.get(name.split(".")[-2], 3)


def write(
    model: Any,
    form: Form,
    folder: Path,
    save: Callable[[Any, Path], None],
    packs: Callable[[str], bool] = lambda name: name.endswith("proj.weight"),
) -> dict[str, Tensor]:
    """Save a model with packed linears; its own linears get the numbers that those stand for, which are returned by name.

    A checkpoint may have other names than the model: a parameter is found by its numbers.
    """
    save(model, folder)
    file, values = folder / "model.safetensors", {}
    tensors = load_file(file)
    parameters = {each.detach().float().numpy().tobytes(): name for name, each in model.named_parameters()}
    for name in [name for name, tensor in tensors.items() if packs(name) and tensor.ndim == 2]:
        weight = tensors.pop(name).float()
        made, numbers = tensors_and_values(name.removesuffix(".weight"), weight, form)
        tensors |= made
        target = parameters[weight.numpy().tobytes()]
        model.get_parameter(target).data.copy_(numbers)
        values[target] = numbers
    save_file(tensors, file)
    change_config(folder, form.config)
    return values


def change_config(folder: Path, quantization: dict[str, Any]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))
