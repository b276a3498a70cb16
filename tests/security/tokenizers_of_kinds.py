"""Small tokenizers of several kinds with templates of several manners, in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.tiny import bundled_folder

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = CHATML.replace("m.content", "m.content | trim")
BARE = (
    "{% for m in messages %}<|im_start|>{{ m.name or m.role }}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
QWEN = """
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == "assistant" %}<|im_start|>assistant
{% set content = m.content %}
{%- if "</think>" in content %}{% set content = content.split("</think>")[-1].lstrip("\\n") %}<think>
gone
</think>
{% endif %}{{ content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == "tool" %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} {{ eos_token }}"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def save(folder: Path, tokenizer: Tokenizer, template: str, *, eos: str = "<|im_end|>", bos: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": eos, "pad_token": eos, **({"bos_token": bos} if bos else {})}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def byte_level() -> Tokenizer:
    """A tokenizer of bytes and a few pairs, whose first ids are control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("i", "m"), ("e", "n"), ("en", "d"), ("<", "|"), ("|", ">"), ("Ġ", "a"), ("h", "i")]
    pieces = [*SPECIAL, *letters, *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def written_by(template: str) -> Callable[[Path], Path]:
    """Return what makes a model folder with that template."""
    return lambda folder: save(folder, byte_level(), template)


def with_tags(folder: Path) -> Path:
    """Like Qwen3: tags that are tokens and not special, and a template that looks for them."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return save(folder, tokenizer, QWEN)


def with_blanks_around(folder: Path) -> Path:
    """Like Phi: control tokens that take the blanks beside them, in a tokenizer that writes the first blank itself."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    more = [AddedToken("<|a|>", lstrip=True, rstrip=True), AddedToken("<|w|>", single_word=True), AddedToken("   ")]
    tokenizer.add_special_tokens(more[:2])
    tokenizer.add_tokens([*more[2:], AddedToken("aspirin")])
    return save(folder, tokenizer, CHATML.replace("<|im_start|>", "<|a|> <|w|>.<|im_start|>"))


def unigram(folder: Path) -> Path:
    """Like T5 and Llama 2: control tokens are pieces of the vocabulary, and NFKC makes them out of other characters."""
    letters = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ<>/[]|_.?=+0123456789,'\""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("[INST]", 0.0), *((letter, -9.0) for letter in letters)]
    tokenizer = Tokenizer(models.Unigram([*pieces, ("▁the", -3.0), ("ing", -3.0)], unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "</s>", "[INST]", "[/INST]")])
    return save(folder, tokenizer, LLAMA, eos="</s>", bos="<s>")


def whole_words(folder: Path) -> Path:
    """Like Llama 3, which takes a word of the vocabulary whole; here a control token is such a word too."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*SPECIAL, *letters, "Ġthe"])}
    vocabulary["Ġgap"] = len(vocabulary) + 1
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    splits = pre_tokenizers.Split(Regex(r" ?\S+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return save(folder, tokenizer, CHATML)


def lower_case(folder: Path) -> Path:
    """A tokenizer that finds control tokens after it has lowered all letters, and whose brackets are one character."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2, "user": 3, "hi": 4}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([AddedToken(text, normalized=True) for text in (*SPECIAL, "||turn||", "[UNK]")])
    return save(folder, tokenizer, CHATML.replace("<|im_end|>", "||turn||<|im_end|>"))


def word_tokens(folder: Path) -> Path:
    """Control tokens without any bracket."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["TURN", "ENDTURN"])
    return save(folder, tokenizer, "{% for m in messages %}TURN {{ m.content }} ENDTURN{% endfor %}TURN", eos="ENDTURN")


KINDS: dict[str, Callable[[Path], Path]] = {
    "bundled": lambda folder: bundled_folder(),
    "chatml": written_by(CHATML),
    "trimmed": written_by(TRIMMED),
    "bare": written_by(BARE),
    "tags": with_tags,
    "blanks": with_blanks_around,
    "unigram": unigram,
    "whole words": whole_words,
    "lower case": lower_case,
    "words": word_tokens,
}
