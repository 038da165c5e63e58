"""Tokenizers of the kinds that decoders come with, small enough to be made in a test."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from rich.console import Console
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chairlift_client.models import prepare_default_model

BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
CORPUS = [topics[name] for name in sorted(topics)[:20]] + ["Grüße, señor! 漢字 हिन्दी London"] * 4
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|' + message.role + '|>' }}{{ message.content | trim }}{{ eos_token }}{% endfor %}"
    "{{ '<|assistant|>' }}"
)
_CONTROLS = ["<|user|>", "<|assistant|>", "<|system|>"]


@cache
def smollm2() -> Any:
    """The default model's own: byte-level BPE, no BOS of its own accord."""
    root = Path(__file__).resolve().parents[2]
    return AutoTokenizer.from_pretrained(prepare_default_model(root / "models", Console()))


@cache
def byte_level(*, bos: bool = True) -> Any:
    """Byte-level BPE as GPT-2's and Llama 3's; ``bos`` puts <s> in front of every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrapped(tokenizer, bos)


@cache
def sentencepiece(*, legacy: bool = True) -> Any:
    """Llama 2's kind: blanks as ``▁``, bytes for what the vocabulary lacks, a blank in front."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(
        CORPUS[:20], trainers.BpeTrainer(vocab_size=500, show_progress=False)
    )
    learned = _state(learner)["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [piece for piece in learned["vocab"] if piece not in names]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: place for place, name in enumerate(names)},
            merges=[tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if legacy:
        replaced = [normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)]
        tokenizer.normalizer = normalizers.Sequence(replaced)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(BLANK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrapped(tokenizer, bos=True)


@cache
def metaspace() -> Any:
    """A SentencePiece vocabulary with the Metaspace decoder, as XGLM's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _trained(tokenizer, trainers.BpeTrainer)


@cache
def wordpiece() -> Any:
    """BERT's kind: ``##`` in front of what continues a word."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]"), "removed", invert=True)
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _trained(tokenizer, trainers.WordPieceTrainer)


@cache
def word_ends() -> Any:
    """The first GPT's kind: ``</w>`` behind the last piece of a word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder()
    return _trained(tokenizer, trainers.BpeTrainer, end_of_word_suffix="</w>")


def _trained(tokenizer: Tokenizer, kind: Any, **options: Any) -> Any:
    trainer = kind(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>"],
        show_progress=False,
        **options,
    )
    tokenizer.train_from_iterator(CORPUS[:20], trainer)
    return _wrapped(tokenizer, bos=False)


def _wrapped(tokenizer: Tokenizer, bos: bool) -> Any:
    # One of the three takes the blanks behind it, as Phi-3's do; one is not flagged as special.
    tokenizer.add_special_tokens([AddedToken("<|user|>", rstrip=True), "<s>", "</s>"])
    tokenizer.add_special_tokens(["<|assistant|>"])
    tokenizer.add_tokens([AddedToken("<|system|>", special=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    )


def _state(tokenizer: Tokenizer) -> Any:
    return json.loads(tokenizer.to_str())
