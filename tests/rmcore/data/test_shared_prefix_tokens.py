"""The prefix that two sides share is found in their token ids: where the prompt's text ends is no place to cut.

Texts are made so that the tokenizer merges over that boundary: white space, digits, word parts, accents that combine.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from rmcore.data.rendering import Renderer, Rendering
from rmcore.models.packing.layout import shared_prefix
from rmcore.models.tiny import CHAT_TEMPLATE, END, PAD, START, tiny_tokenizer

WORDS = ("There are", " apples", "the", " the", "in", "ing", "er", "1", "12", "123", "lemon", "yellow")
JOINTS = ("", " ", "  ", "\n", "\n\n", "\t", ".", "\u0301", "\u00e9", "e", "\u4e2d", "\U0001f600", "\u200d", "\r\n")
STARTS = ("the", "There are", " the", "12 apples", "ing", "\nyes", "\u0301a")
TEXTS = st.lists(st.sampled_from(WORDS + JOINTS) | st.characters(codec="utf-8"), min_size=1, max_size=8).map("".join)
KINDS = [("tiny", "chat"), ("tiny", "plain"), ("line breaks", "chat"), ("wordpiece", "plain")]


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """MiniLM's kind: uncased BERT WordPiece with [CLS] and [SEP], over a small vocabulary of its own."""
    letters = [chr(code) for code in (*range(33, 65), *range(91, 127))]
    words = ["there", "are", "apples", "the", "in", "er", "12", "123", "lemon", "yellow", "prompt", "response"]
    inside = [*(f"##{letter}" for letter in letters), "##ing", "##er", "##23"]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *words, *inside]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def line_break_tokenizer() -> Qwen2Tokenizer:
    """Bytes, and one token for two line breaks, as in every large byte-level vocabulary; `tiny` has none."""
    letters = [PAD, START, END, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    merges: Any = [("Ċ", "Ċ")]
    return Qwen2Tokenizer(
        vocab={letter: index for index, letter in enumerate(letters)},
        merges=merges,
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="module")
def tokenizers():
    return {"tiny": tiny_tokenizer(), "wordpiece": wordpiece_tokenizer(), "line breaks": line_break_tokenizer()}


def ids_of_both(renderer: Renderer, prompt: str, a: str, b: str) -> tuple[list[int], list[int]]:
    first, second = renderer.tokenize_sides([(prompt, a), (prompt, b)])
    return first.ids, second.ids


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), KINDS)
@given(prompt=TEXTS, a=TEXTS, b=TEXTS)
@settings(max_examples=150)
def test_the_prefix_is_the_longest_that_leaves_each_side_a_token(tokenizers, name, form, prompt, a, b):
    first, second = ids_of_both(Renderer(tokenizers[name], Rendering(form, 100_000)), prompt, a, b)
    length = shared_prefix(first, second)
    assert first[:length] == second[:length]
    assert 0 <= length < min(len(first), len(second))
    assert length == min(len(first), len(second)) - 1 or first[length] != second[length]
    assert length == shared_prefix(second, first)


@given(first=st.lists(st.integers(0, 2), max_size=12), second=st.lists(st.integers(0, 2), max_size=12))
def test_the_prefix_of_any_two_lists_is_that_of_a_loop(first, second):
    length = 0
    while length < min(len(first), len(second)) - 1 and first[length] == second[length]:
        length += 1
    assert shared_prefix(first, second) == length


@pytest.mark.parametrize(
    ("name", "form", "is_merged_over"),
    [(*kind, merged) for kind, merged in zip(KINDS, (False, True, True, False), strict=True)],
)
def test_the_tokens_of_the_prompts_text_need_not_begin_a_side(tokenizers, name, form, is_merged_over):
    """A splitter by text would let a model read other tokens than the side has; a prefix of ids never does.

    In the plain format the space before a completion becomes part of its first word, in the chat format the line break
    part of a completion's own. WordPiece never joins over white space, and `tiny` has no token for two line breaks.
    """
    renderer = Renderer(tokenizers[name], Rendering(form, 100_000))
    num_merged = 0
    for start in (joint + word for joint in JOINTS for word in STARTS):
        a, b = f"{start} a", f"{start} b"
        first, second = ids_of_both(renderer, "Tell me", a, b)
        length = shared_prefix(first, second)
        assert first[:length] == second[:length]
        assert first[length] != second[length]
        text = renderer.render("Tell me", a)
        before = text[: text.rindex(a)]
        assert renderer.render("Tell me", b).startswith(before)
        alone = renderer.tokenizer(before, add_special_tokens=False).input_ids
        own = first[1:] if name == "wordpiece" else first  # without [CLS]
        num_merged += own[: len(alone)] != alone
    assert (num_merged > 0) == is_merged_over, num_merged
    print(f"{name}, {form}: merged over the boundary in {num_merged} of {len(STARTS) * len(JOINTS)} texts")
