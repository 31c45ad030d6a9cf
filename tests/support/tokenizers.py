"""Tokenizers made on the spot: byte pairs over bytes, and pieces that mark a word's start as SentencePiece does."""

import json

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CONTROL = ["<unk>", "<s>", "</s>"]
WORDS = ["It is a cat. ", "What is number 1? ", "the answer is ", "You are kind", "Hé, it is 漢"] * 9
KINDS = ("normalizer", "always", "first", "never", "bytes", "bytes, trimmed")
BEFORE_ANSWER = {"newline": "<A>\n", "space": "[/I] ", "nothing": "</s>"}


def make_tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    """Begins a text with a space or not, and may trim the offsets of tokens."""
    if kind.startswith("bytes"):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if kind == "bytes, trimmed":
            backend.post_processor = processors.ByteLevel(trim_offsets=True)
        backend.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
        options = {"vocab_size": 600, "special_tokens": CONTROL, "initial_alphabet": alphabet}
        backend.train_from_iterator(WORDS, trainers.BpeTrainer(**options, show_progress=False))
    else:
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        options = {"vocab_size": 360, "special_tokens": CONTROL + [f"<0x{i:02X}>" for i in range(256)]}
        backend.train_from_iterator(WORDS, trainers.BpeTrainer(**options, show_progress=False))
        model = json.loads(backend.to_str())["model"]
        merges = [tuple(merge) for merge in model["merges"]]
        backend = Tokenizer(models.BPE(model["vocab"], merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        if kind == "normalizer":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


TOKENIZERS = {kind: make_tokenizer(kind) for kind in KINDS}


def make_template(before_answer: str) -> str:
    return (
        "<s>{% set before = " + json.dumps(before_answer) + " %}{% for m in messages %}"
        "{% if m.role == 'system' %}<S>\n{{ m.content }}\n{% elif m.role == 'user' %}[I] {{ m.content }}"
        "{% else %}{{ before + m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ before.rstrip(' ') }}{% endif %}"
    )
