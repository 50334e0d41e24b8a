"""Run by test_norm with TRITON_INTERPRET=1: the kernel against float64, and its roundings against the reference's."""

from __future__ import annotations

import torch

from tests.ops.fusion_cases import DIALECTS, draw, heads_of, norm64
from torchweave.ops.kernels.norm import launch_norm
from torchweave.ops.norm import add_rms_norm, gated_rms_norm, rms_norm

EPS = 1e-5


def main() -> None:
    shapes = [draw(1, 3, 64), draw(5, 100), *heads_of(draw(3, 120), 4, 2), draw(4, 3, 2, 8).transpose(0, 2)]
    for x in shapes:
        for name, options in (*DIALECTS, ("none", {})):
            weight = None if name == "none" else draw(x.shape[-1])
            offset, wide = options.get("offset", 0.0), options.get("wide", False)
            y, none = launch_norm(x, None, weight, EPS, offset, wide)
            assert none is None
            torch.testing.assert_close(y.double(), norm64(x, weight, EPS, offset), rtol=2**-21, atol=1e-7)
            residual = torch.flip(x, (0,))
            y, h = launch_norm(x, residual, weight, EPS, offset, wide)
            assert h is not None and h.equal(x + residual)
            torch.testing.assert_close(y.double(), norm64(h, weight, EPS, offset), rtol=2**-21, atol=1e-7)
            assert launch_norm(x, residual, weight, EPS, offset, wide, keep_sum=False)[1] is None

    x, z, weight = draw(6, 16), draw(3, 48)[:, 8:40].unflatten(1, (2, 16)), draw(16)
    for activation, exact in (("silu", torch.nn.functional.silu), ("sigmoid", torch.sigmoid)):
        y, _ = launch_norm(x, None, weight, EPS, 0.0, False, gate=z, activation=activation)
        expected = norm64(x, weight, EPS) * exact(z.double().reshape(6, 16))
        torch.testing.assert_close(y.double(), expected, rtol=2**-20, atol=1e-7)
        halves = (x.half(), z.half(), weight.half())
        y, _ = launch_norm(halves[0], None, halves[2], EPS, 0.0, False, gate=halves[1], activation=activation)
        assert y.equal(gated_rms_norm(*halves, EPS, 0.0, False, activation))

    x, residual, weight = draw(9, 64).half(), draw(9, 64).half() * 2, draw(64).half()
    for _, options in DIALECTS:
        offset, wide = options.get("offset", 0.0), options.get("wide", False)
        assert launch_norm(x, None, weight, EPS, offset, wide)[0].equal(rms_norm(x, weight, EPS, offset, wide))
        y, h = add_rms_norm(x, residual, weight, EPS, offset, wide)
        got_y, got_h = launch_norm(x, residual, weight, EPS, offset, wide)
        assert got_y.equal(y) and got_h is not None and got_h.equal(h)
    assert launch_norm(torch.empty(0, 8), None, None, EPS, 0.0, False)[0].shape == (0, 8)


if __name__ == "__main__":
    main()
