"""Old and new experts in turns, and a sweep of the new ones."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.kernels.experts import MODELS, by_torch, make_calls, make_layers, measure, quantized_layer
from bench.old import fused_experts as old
from torchweave.ops.moe import fused_experts as new

G = new.GemmConfig
SWEEP = {
    "mxfp4": (
        [(4, 1024, 1, 1), (8, 1024, 1, 1), (2, 1024, 1, 1), (4, 2048, 2, 1), (2, 4096, 4, 1)],
        [(4, 2048, 2, 1), (8, 2048, 2, 1), (2, 4096, 4, 1), (4, 4096, 4, 1), (8, 4096, 4, 1), (4, 1024, 1, 1), (4, 8192, 8, 1)],
    ),
    "int4": (
        [(4, 2048, 1, 1), (2, 2048, 1, 1), (4, 1024, 1, 1), (4, 2048, 2, 1), (8, 1024, 1, 1)],
        [(4, 2048, 2, 1), (8, 2048, 2, 1), (2, 2048, 2, 1), (4, 4096, 4, 1), (8, 4096, 4, 1), (4, 8192, 8, 1), (2, 8192, 8, 1)],
    ),
    "fp8_per_block": ([(4, 1024, 4, 2)], [(4, 128, 4, 2)]),
}
TILE_UPS = {"fp8_per_block": [(32, 128, 4, 3), (32, 128, 4, 4), (32, 64, 4, 6), (16, 128, 4, 4)]}
TILE_DOWNS = {"fp8_per_block": [(64, 64, 4, 5), (64, 128, 4, 3), (64, 128, 4, 4), (128, 128, 4, 3)]}
UPS = [(32, 128, 4, 4), (32, 128, 4, 3), (32, 128, 4, 2), (64, 128, 4, 3), (64, 128, 8, 3)]
DOWNS = [(128, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 3), (128, 128, 4, 4), (128, 128, 8, 3)]


def main(name: str, weights: str, seconds: float, path: str) -> None:
    end = time.monotonic() + seconds
    model = MODELS[name]
    layers, plain = map(list, zip(*(quantized_layer(each, weights) for each in make_layers(model)), strict=True))
    model = replace(model, form=layers[0].form)
    ups, downs = ([G(*each) for each in side] for side in SWEEP[weights])
    tile_ups = [G(*each) for each in TILE_UPS.get(weights, UPS)]
    tile_downs = [G(*each) for each in TILE_DOWNS.get(weights, DOWNS)]
    shape = (model.num_experts, model.width, model.inner)
    results: list[dict] = []
    calls = {tokens: make_calls(layers, model, tokens) for tokens in (1, 2, 4, 32)}
    right = {}
    for tokens, given in calls.items():
        one = replace(plain[0], x=given[0].x, index=given[0].index, weight=given[0].weight, out=torch.empty_like(given[0].out))
        by_torch(one)
        right[tokens] = one.out.float()

    def chosen(tokens: int):
        return old.choose(tokens, model.top_k, shape, torch.bfloat16, False, layers[0].up.dtype)

    def build(job) -> None:
        module, strategy, tokens = job
        try:
            module.run(calls[tokens][0], strategy)
        except Exception as error:
            print("failed", strategy, str(error)[:300], flush=True)

    jobs = [(old, chosen(1), 1), (old, chosen(32), 32)]
    for number in range(max(len(ups), len(downs))):
        for dependent in (0, 1) if number < 1 else (1,):
            jobs.append((new, new.Rows(ups[number % len(ups)], downs[number % len(downs)], dependent), 1))
    for number in range(max(len(tile_ups), len(tile_downs))):
        jobs.append((new, new.Tiles(tile_ups[number % len(tile_ups)], tile_downs[number % len(tile_downs)], 16, True), 32))
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, jobs))
    torch.cuda.synchronize()
    print(f"{name} {weights}: {len(jobs)} built, {end - time.monotonic():.0f} s left", flush=True)

    def timed(tokens: int, strategy, module=new, note: str = "") -> float:
        if time.monotonic() > end:
            return 1e9
        try:
            call = calls[tokens][0]
            call.out.fill_(torch.nan)
            module.run(call, strategy)
            error = (call.out.float() - right[tokens]).abs().max().item()
            good = torch.allclose(call.out.float(), right[tokens], rtol=3e-2, atol=3e-2)
            us = measure(lambda each: module.run(each, strategy), calls[tokens])
        except Exception as problem:
            print("failed", tokens, strategy, str(problem)[:200], flush=True)
            return 1e9
        how = [tuple(v.values()) if isinstance(v, dict) else v for v in asdict(strategy).values()]
        print(f"{tokens:3d} {module.__name__.split('.')[0]:11} {us:7.2f} us  error {error:.4f} {how} {note} {'' if good else 'WRONG'}", flush=True)
        results.append({"tokens": tokens, "module": module.__name__, "us": us, "how": how, "error": error})
        return us if good else 1e9

    best = new.Rows(ups[0], downs[0], 1)
    if len(ups) > 1:
        best = min((new.Rows(up, downs[0], 1) for up in ups), key=lambda s: timed(1, s))
        best = min((replace(best, down=down) for down in downs), key=lambda s: timed(1, s))
        best = min((replace(best, dependent=dependent) for dependent in (0, 1, 2)), key=lambda s: timed(1, s))
        for tokens in (1, 2):
            for _ in range(3):
                timed(tokens, chosen(1), old, "turn")
                timed(tokens, best, new, "turn")
    tile = new.Tiles(tile_ups[0], tile_downs[0], 16, True)
    tile = min((replace(tile, up=up) for up in tile_ups), key=lambda s: timed(32, s))
    tile = min((replace(tile, down=down) for down in tile_downs), key=lambda s: timed(32, s))
    for _ in range(3):
        timed(32, chosen(32), old, "turn")
        timed(32, tile, new, "turn")
    if len(ups) > 1:
        timed(4, best)
        timed(4, tile)
    print(f"{end - time.monotonic():.0f} s left", flush=True)
    Path(path).write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])
