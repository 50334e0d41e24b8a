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
        [(2, 1024, 1, 1), (4, 1024, 2, 1), (4, 1024, 1, 1), (1, 1024, 1, 1), (2, 2048, 2, 1), (4, 2048, 4, 1), (2, 4096, 4, 1)],
        [(2, 4096, 4, 1), (4, 4096, 4, 1), (2, 2048, 2, 1), (4, 8192, 8, 1), (1, 4096, 4, 1)],
    ),
    "int4": (
        [(4, 2048, 1, 1), (2, 2048, 1, 1), (2, 1024, 1, 1), (4, 1024, 1, 1), (4, 2048, 2, 1)],
        [(4, 4096, 4, 1), (4, 2048, 2, 1), (2, 4096, 4, 1), (8, 4096, 4, 1)],
    ),
}
def main(name: str, weights: str, seconds: float, path: str) -> None:
    end = time.monotonic() + seconds
    model = MODELS[name]
    layers, plain = map(list, zip(*(quantized_layer(each, weights) for each in make_layers(model)), strict=True))
    model = replace(model, form=layers[0].form)
    ups, downs = ([G(*each) for each in side] for side in SWEEP[weights])
    shape = (model.num_experts, model.width, model.inner)
    results: list[dict] = []
    calls = {tokens: make_calls(layers, model, tokens) for tokens in (1, 2, 4, 8, 32, 256, 2048)}
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

    def same(strategy):
        up, down = (G(**asdict(each)) for each in (strategy.up, strategy.down))
        return new.Tiles(up, down, strategy.block_m, strategy.dependent)

    jobs = [(old, chosen(tokens), tokens) for tokens in (1, 32, 256, 2048)]
    jobs += [(new, same(chosen(tokens)), tokens) for tokens in (32, 256, 2048)]
    for number in range(max(len(ups), len(downs))):
        for dependent in (0, 1, 2) if number < 1 else (1,):
            jobs.append((new, new.Rows(ups[number % len(ups)], downs[number % len(downs)], dependent), 1))
    tile = new.Tiles(G(32, 128, 4, 4), G(128, 128, 4, 4), 16, True)
    jobs += [(new, tile, 32), (new, new.Tiles(G(64, 128, 4, 3), G(64, 128, 4, 4), 16, True), 32)]
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
    for tokens in (4, 8):
        timed(tokens, best)
        timed(tokens, same(chosen(32)))
        timed(tokens, tile)
    for tokens in (32, 256, 2048):
        for _ in range(2):
            timed(tokens, chosen(tokens), old, "turn")
            timed(tokens, same(chosen(tokens)), new, "turn")
    timed(32, tile)
    timed(32, new.Tiles(G(64, 128, 4, 3), G(64, 128, 4, 4), 16, True))
    print(f"{end - time.monotonic():.0f} s left", flush=True)
    Path(path).write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}))


def linears() -> None:
    """Linears in 4 bits of one token by old and new row kernels in turns."""
    from bench.old import int_linear as before
    from torchweave.models.weights.int_linear import IntScheme, quantize_int_weight
    from torchweave.ops.kernels.quant import int_linear as after
    from torchweave.ops.quant.int_linear import choose

    for rows, width in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (5120, 2048), (2048, 4096)):
        copies = max(2, (1 << 28) // (rows * width // 2))
        weight = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        made = quantize_int_weight(weight, IntScheme())
        ws = [(made.w.clone(), made.scale.clone()) for _ in range(copies)]
        for tokens in (1, 2):
            x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
            outs = {}
            config = choose(tokens, rows, width, 4)
            for turn in range(3):
                for module in (before, after):
                    out = torch.empty(tokens, rows, device="cuda", dtype=torch.bfloat16)

                    def execute(pair) -> None:
                        module.launch(config, x, *pair, None, None, made.group, out)

                    execute(ws[0])
                    us = measure(execute, ws)
                    outs.setdefault(module.__name__.split(".")[0], (out.float(), []))[1].append(round(us, 2))
            (a, old_us), (b, new_us) = outs.values()
            print(rows, width, tokens, config.kernel, "old", old_us, "new", new_us, "difference", (a - b).abs().max().item(), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "linears":
        linears()
        sys.exit()
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])
