"""Streamed text adds up to the text of all tokens, for any division, without broken characters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from torchweave.tokenizer import Tokenizer

TEXT = ["Hello world, don't panic .", "naïve café — 日本語のテキスト 🎉👩‍👩‍👧 done", "  two spaces\n\ttab"] * 3
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> Rust:
    rust = Rust(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rust.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    )
    return rust


def sentence_piece() -> Rust:
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    rust = Rust(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.train_from_iterator(
        ["Hello world, don't panic . two spaces"],
        trainers.BpeTrainer(vocab_size=340, special_tokens=special[:3], initial_alphabet=[]),
    )
    vocab = rust.get_vocab()
    merged = models.BPE(
        vocab=vocab | {piece: len(vocab) + i for i, piece in enumerate(special[3:])},
        merges=[],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    rust.model = merged
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return rust


@pytest.fixture(scope="module", params=[byte_level, sentence_piece], ids=["byte_level", "sentence_piece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=request.param(), bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    found = Tokenizer.from_folder(folder)
    assert found is not None
    return found


def pieces(tokenizer: Tokenizer, ids: list[int], size: int = 1, prompt: list[int] | None = None) -> list[str]:
    stream = tokenizer.stream(prompt or [])
    given = [stream.feed(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*given, stream.finish()]


@pytest.mark.parametrize("text", TEXT[:3])
@pytest.mark.parametrize("size", [1, 3])
def test_pieces_joined_are_the_text_and_never_broken(tokenizer: Tokenizer, text: str, size: int) -> None:
    ids = tokenizer.encode(text)
    given = pieces(tokenizer, ids, size)
    assert "".join(given) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in given)


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("ab .é日🎉\n"), max_size=24), sizes=st.integers(1, 5))
def test_any_text(tokenizer: Tokenizer, text: str, sizes: int) -> None:
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids, sizes)) == tokenizer.decode(ids)


def test_characters_show_as_soon_as_they_are_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🎉b")
    given = pieces(tokenizer, ids)
    assert "".join(given[:-2]).endswith("🎉")
    assert given[-1] == ""


def test_the_first_token_keeps_its_space_behind_a_prompt(tokenizer: Tokenizer) -> None:
    prompt, both = tokenizer.encode("Hello"), tokenizer.encode("Hello world")
    assert both[: len(prompt)] == prompt
    assert "".join(pieces(tokenizer, both[len(prompt) :], prompt=prompt)) == " world"


def test_invalid_utf8_is_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🎉b")
    half = ids[: len(ids) - 2]
    given = pieces(tokenizer, half)
    assert not any("\ufffd" in piece for piece in given[:-1])
    assert "\ufffd" in given[-1]
    long = ids[1:2] * 9 + tokenizer.encode("b")
    assert "".join(pieces(tokenizer, long)).rstrip().endswith("b")


def test_a_prompt_that_ends_with_a_character_of_many_bytes_does_not_break_the_answer(tokenizer: Tokenizer) -> None:
    prompt, both = tokenizer.encode("🎉🎉"), tokenizer.encode("🎉🎉🎉 a")
    assert both[: len(prompt)] == prompt
    assert "".join(pieces(tokenizer, both[len(prompt) :], prompt=prompt)) == "🎉 a"


def test_prompt_that_ends_within_a_character_loses_no_output(tokenizer: Tokenizer) -> None:
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in ("H🎉", "H🎉do"))
    assert after[: len(before)] == before
    for cut in range(1, len(before)):
        for size in (1, len(after)):
            assert "".join(pieces(tokenizer, after[cut:], size, prompt=after[:cut])).endswith("do")


@pytest.mark.parametrize("size", [2, 3, 100])
def test_the_text_is_the_same_however_its_tokens_are_divided(tokenizer: Tokenizer, size: int) -> None:
    """Half of a character costs those before it nothing: some decoders show all bytes in a row broken then."""
    whole, byte = tokenizer.encode("日本🎉"), tokenizer.encode("🎉", add_special_tokens=False)[-1]
    for ids, shown in ((whole[:-1], "日本"), ([*whole, byte], "日本🎉"), ([*whole, byte, *whole], "日本🎉")):
        one_by_one = "".join(pieces(tokenizer, ids))
        assert one_by_one.startswith(f"{shown}\ufffd")
        assert "".join(pieces(tokenizer, ids, size)) == one_by_one


def test_texts_of_single_tokens_take_bounded_memory(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that keeps the text of every token grows until it has streamed the whole vocabulary."""
    monkeypatch.setattr("torchweave.tokenizer._CACHED_TEXTS", 16)
    bounded = Tokenizer(tokenizer.folder)
    assert len(tokenizer) > 100
    for token in range(len(tokenizer)):
        for skip in (True, False):
            assert bounded.text([token], skip) == tokenizer.decode([token], skip)
        assert bounded.token_text(token) == tokenizer.token_text(token)
    for cache in (bounded._text_alone, bounded._text_within):
        assert cache.cache_info().currsize == 16


def test_special_tokens_are_skipped_by_default(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_id
    assert eos is not None
    ids = [*tokenizer.encode("a b"), eos, *tokenizer.encode(" c", add_special_tokens=False)]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)
    stream = tokenizer.stream([], skip_special_tokens=False)
    assert "</s>" in "".join([*(stream.feed([token]) for token in ids), stream.finish()])
    silent = tokenizer.stream([])
    assert "".join(silent.feed([eos]) for _ in range(500)) == ""
    assert len(silent._window) < 100


def test_chat_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizer.chat(messages) == tokenizer.encode("<|user|>Hello<|assistant|>", add_special_tokens=False)
    plain = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    plain.save_pretrained(tmp_path)
    without = Tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        without.chat(messages)
    with pytest.raises(ValueError, match=r"chat_template is not valid Jinja: line 2: Unexpected end of template"):
        without.chat(messages, chat_template="a\n{% if b %}")
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert without.chat(messages, chat_template=marked) == without.encode("Hello", add_special_tokens=False)


def test_files_are_read_at_the_first_use_only(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None
    assert Tokenizer.from_folder(None) is None
    (tmp_path / "tokenizer.json").write_text("{")
    found = Tokenizer.from_folder(tmp_path)
    assert found is not None
    with pytest.raises(ValueError, match="cannot be read"):
        found.encode("a")


CODE = """
from transformers import PreTrainedTokenizerFast
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def test_trust_remote_code_runs_tokenizer_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the terminal was asked"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    PreTrainedTokenizerFast(tokenizer_object=byte_level()).save_pretrained(tmp_path)
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text(CODE)
    with pytest.raises(ValueError, match="use trust_remote_code if you trust it"):
        Tokenizer(tmp_path).encode("a")
    trusted = Tokenizer(tmp_path, trust_remote_code=True)
    assert type(trusted.hf_tokenizer).__name__ == "OwnTokenizer" and trusted.decode(trusted.encode("a b")) == "a b"


def test_import_without_torch_is_silent_while_logging_is_configured() -> None:
    """uvicorn configures logging in the thread beside the import."""
    code = """
import logging.config, sys
from torchweave.tokenizer import import_without_torch

class Configure:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("transformers."):
            logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})

sys.meta_path.insert(0, Configure())
import_without_torch()
assert "torch" not in sys.modules and "transformers" in sys.modules
from transformers.utils.import_utils import define_import_structure as listed
before = listed.cache_info().misses
listed(sys.modules["transformers.models"].__file__)
assert listed.cache_info().misses == before + 1, "the models were listed twice"
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_processors_are_imported_silently_without_torch() -> None:
    """transformers executes its own package again when a processor is imported, and warns of the missing torch each time."""
    code = """
from torchweave.images import _load_processor
from torchweave.tokenizer import import_without_torch
import_without_torch()
try:
    _load_processor("/nonexistent", False)
except Exception:
    import transformers.processing_utils
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
