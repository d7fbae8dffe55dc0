"""Prepare a tokenizer before text is rendered with it: a pad token that ends no side, and a date that stays.

Both go into the checkpoint with the tokenizer, so that tokens and rewards depend on neither the day nor the reader.
"""

import re
from datetime import date
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIXED_DATE = date(2024, 7, 26)
"""Date that templates write in a training: the default of Llama's own templates if no clock is available."""
_ASKS_THE_DAY = re.compile(r"strftime_now\s*\(")
"""The beginning of a call of the function that transformers offers to templates."""
_DAYS_DATE = re.compile(_ASKS_THE_DAY.pattern + r"""\s*(?:format\s*=\s*)?("[^"]*"|'[^']*')\s*\)""")
"""Such a call with its form as a literal."""
FOR_PADDING = re.compile(r"^\W*(?:finetune_right_)?pad(?:ding)?(?:_id|_token)?\W*$", re.IGNORECASE)
"""Names of tokens for padding text: `<pad>`, `[PAD]`, Llama 3.1's `<|finetune_right_pad_id|>`; not for pictures."""
IN_RESERVE = re.compile(r"reserved|unused|(?:extra|special|control)_\d|placeholder|dummy", re.IGNORECASE)
"""Names of special tokens that no training used: of Llama 3, Gemma, Qwen, Mistral, Phi."""


def fix_date(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Put FIXED_DATE into the chat template where it asks for the day's date. True if it does.

    Otherwise the tokens of a training, and of everything scored with its checkpoint, would depend on the day.
    """
    found = tokenizer.chat_template
    if isinstance(found, dict):
        fixed: Any = {name: _DAYS_DATE.sub(_fixed, one) for name, one in found.items()}
    else:
        fixed = _DAYS_DATE.sub(_fixed, found or "")
    if fixed == (found or ""):
        return False
    tokenizer.chat_template = fixed
    return True


def _fixed(call: re.Match[str]) -> str:
    """Return the date as a literal of the template, in the requested format and its quotes."""
    quote, form = call[1][0], call[1][1:-1]
    return quote + FIXED_DATE.strftime(form) + quote


def depends_on_the_day(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the chat template asks for the day's date."""
    return _ASKS_THE_DAY.search(str(tokenizer.chat_template)) is not None


def ensure_pad_token(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Give a tokenizer whose model no reward head was trained with a pad token. True if the vocabulary grew.

    Lengths always come from attention masks, never from pad ids. Hugging Face's causal classes read the reward at the
    last token that is not the pad token, others at the very last, so no side may end in the pad token. A chat template
    may write EOS there: the pad is then a token that nothing writes, in place of EOS, too, where that is named as the
    pad. Without a template the pad is EOS, which `Renderer` then closes no side with. Where there is no such token, it
    is a new `[PAD]`.
    """
    eos, is_chat = tokenizer.eos_token, bool(tokenizer.chat_template)
    if tokenizer.pad_token_id is not None and not (is_chat and tokenizer.pad_token == eos):
        return False
    pad = _unused_token(tokenizer) if is_chat else eos
    if pad is not None:
        tokenizer.pad_token = pad
        return False
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return True


def _unused_token(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """A token that ends no chat: one kept for padding or in reserve that the template does not write, else UNK."""
    others = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.sep_token, tokenizer.cls_token, tokenizer.mask_token}
    special = [one.content for _, one in sorted(tokenizer.added_tokens_decoder.items()) if one.special]
    free = [token for token in special if token not in others and token not in str(tokenizer.chat_template)]
    for kind in (FOR_PADDING, IN_RESERVE):
        found = next((token for token in free if kind.search(token)), None)
        if found is not None:
            return found
    unknown = tokenizer.unk_token
    return None if unknown in others else unknown
