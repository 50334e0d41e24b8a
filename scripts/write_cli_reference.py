"""Write docs/cli.md: every command and option, from the parsers and the dataclasses that they fill.

python scripts/write_cli_reference.py [--output docs/cli.md]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from torchweave.cli import main
from torchweave.cli.arguments import OPTIMIZATION_LEVELS, Parser
from torchweave.cli.commands import (
    bench,
    bench_profile,
    bench_serve,
    cache,
    chat,
    doctor,
    explain,
    generate,
    models,
    serve,
    tune,
)
from torchweave.cli.options import options_of
from torchweave.config import format_value
from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.engine.request import SamplingParams

ROOT = Path(__file__).resolve().parents[1]

HEAD = """# Command line

Written by `scripts/write_cli_reference.py` from the parsers; change those.

    torchweave COMMAND [OPTION...]

"""
SPELLINGS = """
Options may be written `--max_model_len 512`, `--max-model-len=512`; flags `--ignore_eos`, `--ignore_eos=true`,
`--no_ignore_eos`. `-cc.NAME=VALUE` is short for `--torch_compile_config.NAME=VALUE`. Lists are `1,2,4` or the option more than
once, and `null` is what these pages call None. Text that starts with a dash goes after `--`. A name that is not known is refused
with the nearest one.

A YAML file (`--config FILE`) holds the same names, nested or dotted: options of the engine, and those of the server, of sampling
or of what is measured where the command has them.

```yaml
max_model_len: 4096
torch_compile_config:
  enable_inductor: true
  capture_num_tokens: [1, 2, 4, 8, 16, 32, 64, 128, 256]
cuda_graph_config.max_batch_size: 64
```

What is asked on the command line wins over the file, and both win over the level `-O`:
"""
EXIT_CODES = """
Exit codes: 0 done; 1 a check failed (`models verify`, `doctor`, `cache verify`, `cache import`), or a rank or a server's engine
ended; 2 what was asked cannot be, with one sentence on standard error (`--traceback` shows where in the code); 130 interrupted.
"""
SAMPLING_DEFAULTS = """
These defaults are `SamplingParams`' own, as in Python. On the command line `max_tokens` is 256 unless given, and `temperature`,
`top_k`, `top_p`, `min_p` and `repetition_penalty` are what the checkpoint's `generation_config.json` says; where it says nothing,
decoding is greedy. `generate --json` tells `logprobs`; `prompt_logprobs` are for Python and the server.
""".strip()


def page() -> str:
    """The page as Markdown."""
    lines = [HEAD, "| command | |", "|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {text} |" for name, text in main.COMMANDS.items()]
    lines += [SPELLINGS, "| level | sets |", "|---|---|"]
    lines += [f"| `-O{level}` | {_settings(values)} |" for level, values in OPTIMIZATION_LEVELS.items()]
    lines.append(EXIT_CODES)
    lines += _command("generate", generate.DESCRIPTION, generate.parser())
    lines += _command("chat", chat.DESCRIPTION, chat.parser())
    lines += _command("serve", serve.DESCRIPTION, serve.parser())
    lines += _options("### Server options", ServerConfig)
    lines += _command("explain", explain.DESCRIPTION, explain.parser())
    actions = "\n".join(f"- `{name}`: {text}" for name, text in cache.ACTIONS.items())
    lines += _command(
        "cache",
        f"Look after the compile cache: captured graphs and built pieces of earlier starts.\n\n{actions}",
        cache.parser(),
    )
    lines += _command("doctor", doctor.DESCRIPTION, doctor.parser())
    lines += _command("tune", tune.DESCRIPTION, tune.parser())
    lines += _command(
        "models",
        "List what is built in and supported, or compare architectures with transformers token by token (`NAME...` or `--all`).",
        models.parser(),
    )
    lines += [
        "## bench",
        "",
        "`torchweave bench SCENARIO --model MODEL`. `shape:llama-1b`, `shape:llama-8b`, `shape:llama-70b` and",
    ]
    lines += ["`shape:qwen3-30b-a3b` are models without weights, for `--load_format dummy`.", ""]
    lines += ["| scenario | measures |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, text in bench.SCENARIOS.items()]
    lines += ["", *_own_options(bench.parser("suite")), *_options("### What is measured", bench.Options)]
    lines += _options("### What `bench profile` runs", bench_profile.Options)
    lines += _options("### What `bench serve` sends", bench_serve.Options)
    lines += _options("## Engine options", EngineConfig, skip=("model",))
    lines += ["`torchweave explain MODEL` shows what each became, and why.", ""]
    lines += _options("## Sampling options", SamplingParams)
    lines += [SAMPLING_DEFAULTS]
    return "\n".join(lines).rstrip() + "\n"


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={format_value(value)}`" for name, value in values.items()) or "nothing: all defaults"


def _command(name: str, text: str, parser: Parser | None) -> list[str]:
    usage = [] if parser is None or parser.usage is None or parser.usage in text else [f"    {parser.usage}", ""]
    lines = [f"## {name}", "", *usage, text, ""]
    return lines + (_own_options(parser) if parser is not None else [])


def _own_options(parser: Parser) -> list[str]:
    """The options of a parser that fill no dataclass."""
    rows = []
    for action in parser._actions:
        names = [text for text in action.option_strings if text[2:] not in parser.options]
        if names and action.help and "-h" not in names:
            value = f" {action.metavar}" if action.metavar else ""
            rows.append(f"| `{names[0]}{value}` | {_cell(action.help)} |")
    return ["| option | |", "|---|---|", *rows, ""]


def _options(title: str, config: type, skip: Sequence[str] = ()) -> list[str]:
    defaults = _defaults(config)
    rows = [
        f"| `--{name}` | {_cell(option.metavar)} | {_cell(format_value(defaults.get(name)))} | {_cell(option.text)} |"
        for name, option in options_of(config).items()
        if name not in skip
    ]
    return [title, "", "| option | takes | default | |", "|---|---|---|---|", *rows, ""]


def _defaults(config: type, prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    instance = config(model="") if config is EngineConfig else config()
    for item in fields(instance):
        value = getattr(instance, item.name)
        if is_dataclass(value):
            values.update(_defaults(type(value), f"{prefix}{item.name}."))
        else:
            values[prefix + item.name] = value
    return values


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def run() -> None:
    parser = argparse.ArgumentParser(description="Write docs/cli.md.", allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "cli.md")
    path = parser.parse_args().output
    path.write_text(page(), encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    run()
