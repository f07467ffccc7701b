"""A byte-level tokenizer: every byte is one token whose id is the byte, so any text goes in and lengths are exact."""

from __future__ import annotations

import json
from pathlib import Path

from overlay.checkpoint.tiny_config import SPECIAL_TOKENS, TOKEN_IDS

# Byte-level tokenizers spell a byte as one printable character: itself where it is a printable, non-blank Latin-1
# character, else the next free one from U+0100 on.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}

CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages %}<|{{ message.role }}|>
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'text' %}{{ part.text }}
{%- elif part.type in ('image', 'image_url') %}<|begin_of_image|><|image|><|end_of_image|>
{%- elif part.type in ('video', 'video_url') %}<|begin_of_video|><|video|><|end_of_video|>{% endif %}
{%- endfor %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""


def byte_characters() -> list[str]:
    """The character that spells each of the 256 bytes, in order."""
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in _PRINTABLE else next(spare)) for byte in range(256)]


def write_tokenizer(folder: Path, longest: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja for contexts of up to `longest` tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    numbered = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    assert numbered == TOKEN_IDS, numbered
    tokenizer.save(str(folder / "tokenizer.json"))

    end = SPECIAL_TOKENS[0]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "eos_token": end,
        "pad_token": end,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
