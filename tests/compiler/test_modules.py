"""Modules of transformers, compiled as `scripts/docs/module_matrix.py` compiles all of its modules."""

from __future__ import annotations

from dataclasses import replace

import module_matrix
import pytest
import torch
from module_zoo import entries
from torch import nn

MODULES = ("llama", "vit", "wav2vec2")
"""A decoder whose forward is decorated, a vision transformer, and audio."""


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_transformers_equals_eager(name: str):
    (entry,) = (each for each in entries() if each.name == name)
    assert module_matrix.check(entry, inductor=False) == "equal"


def test_the_matrix_sees_a_wrong_module_and_a_refused_one():
    (entry,) = (each for each in entries() if each.name == "vit")

    class Changing(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x

    refused = replace(entry, build=lambda: (Changing(), lambda batch: {"x": torch.randn(batch, 3)}))
    assert module_matrix.check(refused, inductor=False).startswith("refused: ")
    x = torch.randn(2, 3)
    assert module_matrix.difference(x, x.clone()) == ""
    assert module_matrix.difference(x * 1.01, x).startswith("differs by 1.0e-02") and module_matrix.difference(x[:1], x)


def test_tables_of_the_page_are_read_back():
    rows = {
        ("timm", "resnet18"): {"FX": "equal", "Inductor": "equal"},
        ("timm", "other"): {"FX": "refused: a | b"},
    }
    page = f"{module_matrix.BEGIN}\n{module_matrix.table(rows)}\n{module_matrix.END}"
    read = module_matrix.read_rows(page)
    assert read["timm", "resnet18"] == rows["timm", "resnet18"] and read["timm", "other"]["FX"] == "refused: a | b"
    assert "| all | 2 | 2 | 1 | 1 | 0 | 0 | 0 | 1 | 1 | 0 | 0 | 0 | 0 |" in page
