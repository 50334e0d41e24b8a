"""An unmodified transformers model with a boundary op: one graph, three distinct pieces, equal results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.toy import BOUNDARY, DYNAMIC, example, step
from torchweave.compiler import compile_graph, eager_forward
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

transformers = pytest.importorskip("transformers")


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    q, k, v = (each.squeeze(0).transpose(0, 1) for each in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    torch.ops.toy.attention(q, k, v, out, module.layer_idx, scaling)
    return out.unsqueeze(0), None


class Flat(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor) -> Tensor:
        output = self.model(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=logits_index
        )
        return output.logits[0]


@pytest.fixture(scope="module")
def llama() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("toy", _attention)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    batches = [step(*size) for size in ((1, 1), (2, 2), (23, 3), (64, 5))]
    want = [model(input_ids=ids[None], position_ids=pos[None]).logits[0, index] for ids, pos, index in batches]
    model.config._attn_implementation = "toy"
    return Flat(model), batches, want


@pytest.mark.parametrize("mode", ["backed_size_oblivious", "unbacked"])
def test_llama_is_captured_as_one_graph(llama: Any, mode: Any) -> None:
    module, batches, want = llama
    report = Report(show=False)
    config = TorchCompileConfig(enable_inductor=False, dynamic_shapes=mode)
    compiled_graph = compile_graph(module, example(), DYNAMIC, boundary_ops=BOUNDARY, config=config, report=report)
    assert len(compiled_graph.pieces) == 6 and len(compiled_graph.built) == 3
    assert any(name.startswith("transformers.models.llama") for name in compiled_graph.sources)
    plain = eager_forward(module, BOUNDARY)
    for batch, logits in zip(batches, want, strict=True):
        torch.testing.assert_close(compiled_graph(call_op, *batch), logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(plain(call_op, *batch), compiled_graph(call_op, *batch), rtol=1e-5, atol=1e-6)
