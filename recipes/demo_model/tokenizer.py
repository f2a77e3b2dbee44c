"""The demo policy's tokenizer: a small byte-level BPE with Qwen2's special tokens and our chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single tokens like Qwen's, but not special: the tool parser has to find them in the decoded text."""

WORD_PATTERN = "|".join(
    [
        r"\\[nt\"\\]",  # escapes inside JSON texts
        r"\n",
        r"\"(?:: [\[{]*\"?|, \"|[}\]]+)|{\"",  # JSON syntax around texts
        r" ?[\p{Ll}_]+",
        r"\p{L}+",
        r"[}\]]{2,}",
        r" {1,16}(?= )",
        r" ?\d",
        r" ?[=+\-*/%<>!:.]+",
        r" ?[^\s\p{L}\d_]",
        r"\s",
    ]
)
"""How text is cut before merging. A span is cut the same way wherever it stands, which makes copying easy to learn.

Newlines stand alone, so a turn tokenised alone and inside a conversation is the same (verl appends turns one by one).
A quotation mark never joins what it quotes, an escaped newline is cut off like a real one, a capitalised name does not
take the blank before it, and every digit is a token."""

CHAT_TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")


def _empty_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, max_context_tokens: int) -> PreTrainedTokenizerFast:
    """Learn the merges from texts.

    Args:
        texts: rendered conversations or parts of them; the markup in them is left out of the merges.
        vocab_size: number of tokens with the special ones, 263 at least (256 bytes and 7 added tokens).
        max_context_tokens: stored as the tokenizer's ``model_max_length``.

    Returns:
        A tokenizer whose end of sequence is ``<|im_end|>`` and whose padding is ``<|endoftext|>``.

    Raises:
        ValueError: vocab_size is too small.
    """
    added = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    added += [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(added):
        raise ValueError(
            f"vocab_size is {vocab_size}, expected at least {len(alphabet) + len(added)}: "
            f"one token per byte and {len(added)} added ones"
        )
    tokenizer = _empty_bpe()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added), initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    markup = re.compile("|".join(re.escape(token) for token in (*CONTROL_TOKENS, *MARKUP_TOKENS)))
    tokenizer.train_from_iterator((markup.sub("\n", text) for text in texts), trainer)
    tokenizer.add_tokens(added)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE_PATH.read_text(encoding="utf-8"),
        model_max_length=max_context_tokens,
        clean_up_tokenization_spaces=False,
    )
