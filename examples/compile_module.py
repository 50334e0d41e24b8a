"""Compile a plain module once for any number of tokens, and print the generated code."""

import torch
from torch import nn

import torchweave

module = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64), nn.LayerNorm(64)).eval()
compiled = torchweave.compile(module, {"input": torch.zeros(8, 64)}, dynamic={"input": {0: "T"}})
for tokens in (1, 7, 300):
    x = torch.randn(tokens, 64)
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)
print(compiled.compiled_graph.plan)
print(compiled.compiled_graph.code)
