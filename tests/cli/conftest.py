"""A model folder with a tokenizer and a chat template, small enough for a command to start in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+-=:,. "


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of three layers over single characters; its output is deterministic noise."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from torchweave.verify.zoo import build, zoo_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    build(zoo_model("llama")).save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{letter: 3 + index for index, letter in enumerate(ALPHABET)}}
    vocabulary |= {chr(0x4E00 + index): index for index in range(len(vocabulary), 256)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}. {% endfor %}a: "
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_args(tiny_model: Path) -> list[str]:
    """The model and options that start it fast."""
    return [str(tiny_model), "-O0", "--cpu_kv_cache_gib", "0.02", "--quiet"]
