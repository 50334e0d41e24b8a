"""Soak test with clients that disconnect at random: memory must stay flat and all blocks be free at the end.

    torchweave serve MODEL &
    python bench/serving/soak.py --pid $! [--base_url URL] [--seconds 600] [--streams 100] [--features] [--images] [--json FILE]

About six in ten clients disconnect before their response ends: a tenth of them within 10 ms, the others within three seconds.
With `--features` a request draws some of the sampling parameters, structured outputs, log-probabilities, several answers or beam
search; the model needs a tokenizer. With `--images` each request is a chat about an image that no other has, of 32 to 1,024
pixels a side.
Samples the memory of the server's process tree and, from nvidia-smi, of the GPU every few seconds. Exit code 1 if a response
was incomplete, a block is in use two seconds after the last request, or something was compiled.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import glob
import io
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.bench.result import environment
from torchweave.bench.serving.http import HttpClient

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
}
STRUCTURED = (
    {"json": SCHEMA},
    {"regex": "(ab|c[0-9]{1,3})*d"},
    {"choice": ["yes", "no", "apple fig"]},
    {"grammar": 'start: "a" start "b" | "c"'},
)


def features(draw: random.Random) -> dict[str, Any]:
    """Fields of a request: each sampling feature with its own probability, and one of the forms that exclude each other."""
    fields: dict[str, Any] = {"temperature": draw.choice([0.0, 0.3, 1.0, 2.0])}
    maybe = {
        "seed": draw.randrange(100),
        "top_p": draw.uniform(0.05, 1.0),
        "top_k": draw.randint(1, 60),
        "min_p": draw.random() / 4,
        "presence_penalty": draw.uniform(-2, 2),
        "frequency_penalty": draw.uniform(-2, 2),
        "repetition_penalty": draw.uniform(0.8, 1.5),
        "logit_bias": {str(draw.randrange(3, 100)): draw.uniform(-20, 20) for _ in range(draw.randint(1, 30))},
        "bad_words": [draw.choice(["apple", "12", "fig pear"]), "zz"],
        "stop": [draw.choice(["pear", "99", "x y"]), "###"],
        "stop_token_ids": [draw.randrange(3, 100)],
        "min_tokens": draw.randint(1, 20),
        "logprobs": draw.randint(0, 5),
        "priority": draw.randint(-3, 3),
        "cache_salt": draw.choice("ab"),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "ignore_eos": True,
    }
    fields |= {name: value for name, value in maybe.items() if draw.random() < 0.2}
    form = draw.random()
    if form < 0.1:
        fields |= {"structured_outputs": draw.choice(STRUCTURED)}
        fields.pop("min_tokens", None)
    elif form < 0.2:
        fields |= {"n": draw.randint(2, 4)}
    elif form < 0.25:
        fields |= {"allowed_token_ids": sorted(draw.sample(range(3, 100), 20))}
    elif form < 0.3:
        fields = {"beam_width": draw.randint(2, 4), "length_penalty": draw.choice([0.5, 1.0]), "stream": False}
    return fields


@dataclass
class Soak:
    """Attributes:
    counts: answers that were `begun`, those that came `whole`, were `left` or `left_before` their first token, or `failed`.
    faults: what was said where one failed.
    features: draw sampling features of each completion.
    images: send chats with an image each.
    """

    http: HttpClient
    model: str
    prompt_len: tuple[int, int]
    max_tokens: tuple[int, int]
    features: bool = False
    images: bool = False
    draw: random.Random = field(default_factory=lambda: random.Random(5))
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    async def stream(self, end: float) -> None:
        """Send requests one after the other until `end`."""
        while time.monotonic() < end:
            self.counts["begun"] += 1
            try:
                outcome = await self._one()
            except OSError as error:
                outcome = self._failed(repr(error))
            self.counts[outcome] += 1

    async def _one(self) -> str:
        draw, heard = self.draw, list[bytes]()
        path, asked = self._chat() if self.images else self._completion()
        asked |= {"model": self.model, "max_tokens": draw.randint(*self.max_tokens), "stream": True}
        asked |= features(draw) if self.features else {"ignore_eos": True}
        stays = None if draw.random() > 0.6 else draw.random() * 0.01 if draw.random() < 0.1 else draw.random() ** 2 * 3
        try:
            async with asyncio.timeout(stays):
                status = await self.http.post(path, json.dumps(asked).encode(), lambda part, _: heard.append(part))
        except TimeoutError:
            return "left" if heard else "left_before"
        answer = b"".join(heard)
        if status == 200 and answer.rstrip().endswith(b"data: [DONE]" if asked["stream"] else b"}"):
            return "whole"
        return self._failed(f"{status}: {answer.decode(errors='replace')[-300:]}")

    def _completion(self) -> tuple[str, dict[str, Any]]:
        count = self.draw.randint(*self.prompt_len)
        return "/v1/completions", {"prompt": [self.draw.randrange(10, 100) for _ in range(count)]}

    def _chat(self) -> tuple[str, dict[str, Any]]:
        from PIL import Image

        pixels = Image.frombytes("RGB", (8, 8), self.draw.randbytes(192))
        file = io.BytesIO()
        pixels.resize((self.draw.randint(32, 1024), self.draw.randint(32, 1024))).save(file, "JPEG")
        url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in the image?"}]
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}

    def _failed(self, why: str) -> str:
        self.faults.append(why)
        return "failed"


_ENDED = FileNotFoundError, ProcessLookupError  # the process ended during sampling


def processes(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for children in glob.glob(f"/proc/{pid}/task/*/children"):
        with suppress(*_ENDED):
            for child in Path(children).read_text().split():
                found += processes(int(child))
    return found


def memory(pid: int) -> dict[str, float]:
    """Resident memory in MiB, by process name and id."""
    found = {}
    for each in processes(pid):
        with suppress(*_ENDED):
            name = Path(f"/proc/{each}/comm").read_text().strip()
            pages = Path(f"/proc/{each}/statm").read_text().split()[1]
            found[f"{name}.{each}"] = round(int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
    return found


def gpu_memory() -> str:
    """Used memory of each GPU in MiB, from nvidia-smi; empty without a GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    http = HttpClient(args.base_url)
    while (await http.get("/ready"))[0] != 200:  # a server that does not start answers no longer
        await asyncio.sleep(1)
    model = json.loads((await http.get("/v1/models"))[1])["data"][0]
    longest = model["max_model_len"]
    prompt_len = args.prompt_len or (min(65, longest // 3), min(1023, longest * 2 // 3 - 1))
    max_tokens = args.max_tokens or (min(32, longest // 6), min(496, longest // 3))
    it = Soak(http, model["id"], tuple(prompt_len), tuple(max_tokens), args.features, args.images)
    begin = time.monotonic()
    streams = [asyncio.create_task(it.stream(begin + args.seconds)) for _ in range(args.streams)]
    series = []

    async def look() -> dict[str, Any]:
        live = json.loads((await http.get("/live"))[1])
        by_process = memory(args.pid)
        series.append(
            {
                "seconds": round(time.monotonic() - begin, 1),
                "memory_mib": round(sum(by_process.values()), 1),
                "processes_mib": list(by_process.values()),
                "gpu_mib": gpu_memory(),
                "open": live["requests"]["open"],
                "blocks_used": live["blocks"]["used"],
                **it.counts,
            }
        )
        print("  ".join(f"{name} {value}" for name, value in series[-1].items()), flush=True)
        return live

    while not all(stream.done() for stream in streams):
        await look()
        await asyncio.wait(streams, timeout=min(args.seconds / 20, 10))
    await asyncio.gather(*streams)
    await asyncio.sleep(2)
    live = await look()
    last = {
        "memory_mib": memory(args.pid),
        "blocks": live["blocks"],
        "compiles": live["compiled"]["compiles_after_ready"],
    }
    return {
        "scenario": "soak",
        "environment": environment(live["model"]["device"]),  # the server runs on this machine
        "streams": args.streams,
        "prompt_len": None if args.images else prompt_len,
        "features": args.features,
        "images": args.images,
        "max_tokens": max_tokens,
        "faults": it.faults[:20],
        "end": last,
        "series": series,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pid", type=int, required=True, help="process id of the server")
    parser.add_argument("--base_url", default="http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--features", action="store_true", help="draw sampling parameters for each completion")
    parser.add_argument("--images", action="store_true", help="send chats with an image each instead of token ids")
    parser.add_argument("--prompt_len", type=int, nargs=2, help="default: 65 1023, up to two thirds of max_model_len")
    parser.add_argument("--max_tokens", type=int, nargs=2, help="default: 32 496, up to a third of it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = asyncio.run(soak(args))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if found["faults"] or found["end"]["blocks"]["used"] or found["end"]["compiles"]:
        sys.exit(f"not as it should be: {found['faults'][:3]} {found['end']}")


if __name__ == "__main__":
    main()
