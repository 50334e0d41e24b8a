"""Files of a built-in model: character tokenizer, chat template, configs and weights."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MAX_POSITIONS = 512
PAD, BOS, EOS, UNKNOWN, SYSTEM, USER, ASSISTANT, END = SPECIALS = (
    "<pad>",
    "<bos>",
    "<eos>",
    "<unk>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
CHARACTERS = "\n" + "".join(map(chr, range(0x20, 0x7F)))
VOCABULARY = {token: index for index, token in enumerate((*SPECIALS, *CHARACTERS))}

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{% elif message['role'] in ['user', 'system'] %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% else %}"
    "{{ raise_exception('the roles are system, user and assistant') }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token per printable ASCII character and line feed, `<unk>` for others, and automatic `<bos>`."""
    # BPE without merges: every character is a token; a pre-tokenizer would drop or join spaces.
    tokenizer = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[], unk_token=UNKNOWN, fuse_unk=False))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, VOCABULARY[BOS])]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
    )


def build_config(*, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> LlamaConfig:
    """A Llama config with heads of 32 and tied embeddings."""
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=VOCABULARY[BOS],
        eos_token_id=VOCABULARY[EOS],
        pad_token_id=VOCABULARY[PAD],
    )


def save_folder(folder: Path, model: LlamaForCausalLM) -> int:
    """Write a model folder with weights in the model's dtype; returns its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=VOCABULARY[BOS],
        eos_token_id=VOCABULARY[EOS],
        pad_token_id=VOCABULARY[PAD],
    )
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # weights are written with mode 600
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
