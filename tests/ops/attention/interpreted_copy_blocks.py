"""The kernel that moves blocks of the KV cache, run by Triton's interpreter on CPU tensors.

TRITON_INTERPRET=1 PYTHONPATH=. python tests/ops/attention/interpreted_copy_blocks.py
"""

from __future__ import annotations

import torch

from torchweave.ops.kernels.attention.copy_blocks import launch_copy_blocks

if __name__ == "__main__":
    tensors = [torch.randint(256, (9, width), dtype=torch.uint8) for width in (512, 48, 4104 * 8)]
    widths = [tensor.shape[1] for tensor in tensors]
    place = sum(widths)
    host = torch.full((5, place), 7, dtype=torch.uint8)
    parts = torch.tensor(
        [
            (tensor.data_ptr(), width // 8, sum(widths[:i]) // 8)
            for i, (tensor, width) in enumerate(zip(tensors, widths, strict=True))
        ]
    )
    moves = [(3, 0), (8, 4), (0, 1)]
    pairs = torch.tensor([(block, host.data_ptr() + at * place) for block, at in moves])
    launch_copy_blocks(pairs, parts, to_host=True)
    for block, at in moves:
        assert torch.equal(host[at], torch.cat([tensor[block] for tensor in tensors]))
    assert (host[[2, 3]] == 7).all(), "other places were written"
    before = [tensor.clone() for tensor in tensors]
    launch_copy_blocks(torch.tensor([(1, host.data_ptr())]), parts, to_host=False)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[1], old[3])
        assert torch.equal(tensor[2:], old[2:]) and torch.equal(tensor[0], old[0])
    print("ok")
