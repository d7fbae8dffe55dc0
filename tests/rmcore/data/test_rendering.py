import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from rmcore.core.errors import DataError, ModelError
from rmcore.data.pair import Message, PreferencePair, is_blank
from rmcore.data.render_fn import RenderFn
from rmcore.data.rendering import Renderer, Rendering
from rmcore.data.tokenizers import ensure_pad_token

WORDS = ["Prompt", ":", "Response", *(f"w{number}" for number in range(400))]


def word_tokenizer(**special):
    """Whitespace words; special tokens put around the text as named, as real tokenizers do."""
    vocabulary = {word: index for index, word in enumerate(["[UNK]", *special.values(), *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    before = special.get("cls_token") or special.get("bos_token")
    after = special.get("sep_token")
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(filter(None, [before, "$A", after])),
            special_tokens=[(token, vocabulary[token]) for token in filter(None, [before, after])],
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **special)


CAUSAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
ENCODER = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}


def side_tokens(tokenizer, prompt, completion, limit=64):
    side = Renderer(tokenizer, Rendering("plain", limit)).tokenize_sides([(prompt, completion)])[0]
    return tokenizer.convert_ids_to_tokens(side.ids), side.num_cut


def ending_in_eos(added, written=""):
    """A chat tokenizer as Llama 3's: no pad token, special tokens of its own, and a template that ends turns in EOS."""
    tokenizer = word_tokenizer(bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens(added, special_tokens=True)
    tokenizer.chat_template = written + "{% for message in messages %}{{ message.content }} </s> {% endfor %}"
    return tokenizer


OWN_BOS = ("custom", RenderFn("own:render", lambda prompt, completion: f"<s> {prompt} {completion}"))
SIDES = {
    "one BOS, and EOS": (CAUSAL, ("plain", None), 64, "<s> Prompt : w1 w2 Response : w3 </s>"),
    "one SEP": (ENCODER, ("plain", None), 64, "[CLS] Prompt : w1 w2 Response : w3 [SEP]"),
    "nothing to append": ({"pad_token": "<pad>"}, ("plain", None), 64, "Prompt : w1 w2 Response : w3"),
    "a BOS of its own": (CAUSAL, OWN_BOS, 64, "<s> w1 w2 w3 </s>"),
    "a BOS of its own, cut": (CAUSAL, OWN_BOS, 4, "<s> w2 w3 </s>"),
}  # fmt: skip


@pytest.mark.parametrize("name", SIDES)
def test_a_side_has_the_special_tokens_of_its_tokenizer_once(name):
    special, (form, function), limit, expected = SIDES[name]
    tokenizer = word_tokenizer(**special)
    rendering = Rendering(form, limit, function and function.name)
    (side,) = Renderer(tokenizer, rendering, function).tokenize_sides([("w1 w2", "w3")])
    assert tokenizer.convert_ids_to_tokens(side.ids) == expected.split()
    assert side.num_cut == (1 if limit == 4 else 0)


def test_the_pad_token_is_eos_which_then_ends_no_side_else_unk_or_a_new_one():
    """Where EOS is the pad a side ends in text, so that every pooling reads the same token."""
    eos = word_tokenizer(bos_token="<s>", eos_token="</s>")
    assert ensure_pad_token(eos) is False
    assert eos.pad_token == "</s>"
    assert side_tokens(eos, "w1", "w3")[0][-1] == "w3"
    bare = word_tokenizer()
    assert ensure_pad_token(bare) is True
    assert bare.pad_token == "[PAD]"
    assert ensure_pad_token(bare) is False
    chat = ending_in_eos(["<|tool|>"])  # without an unused token
    assert ensure_pad_token(chat) is False
    assert chat.pad_token == "[UNK]"
    chat = ending_in_eos(["<|tool|>"])
    chat.unk_token = None
    assert ensure_pad_token(chat) is True
    assert (chat.pad_token, chat.pad_token_id) == ("[PAD]", len(chat) - 1)


UNUSED_TOKENS = {
    "a pad token that was not named": (
        ["<|tool|>", "<|reserved_special_token_0|>", "<|finetune_right_pad_id|>"],
        {},
        2,
    ),
    "a reserved token": (["<|tool|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"], {}, 1),
    "one that the template does not write": (["[control_1]", "[control_2]"], {"written": "[control_1]"}, 1),
    "a picture's place is none": (["<|image_pad|>", "<unused7>"], {}, 1),
}


@pytest.mark.parametrize(("added", "template", "place"), UNUSED_TOKENS.values(), ids=UNUSED_TOKENS.keys())
@pytest.mark.parametrize("names_eos", [True, False])
def test_a_chat_model_pads_with_a_token_that_ends_no_side(added, template, place, names_eos):
    """Its template ends sides in EOS, which no reader may pass over; a base that names EOS as the pad was not read."""
    tokenizer = ending_in_eos(added, **template)
    if names_eos:
        tokenizer.pad_token = tokenizer.eos_token
    known = len(tokenizer)
    assert ensure_pad_token(tokenizer) is False
    assert (tokenizer.pad_token, len(tokenizer)) == (added[place], known)
    for form in ("chat", "plain"):
        (side,) = Renderer(tokenizer, Rendering(form, 64)).tokenize_sides([("w1", "w3")])
        assert side.ids[-1] == tokenizer.eos_token_id != tokenizer.pad_token_id


@given(st.integers(1, 120), st.integers(1, 120), st.integers(12, 80), st.sampled_from([CAUSAL, ENCODER]))
@settings(max_examples=60)
def test_cutting_keeps_the_end_of_the_prompt_and_the_start_of_the_completion(
    num_prompt, num_completion, limit, special
):
    prompt = [f"w{number}" for number in range(num_prompt)]
    completion = [f"w{200 + number}" for number in range(num_completion)]
    tokenizer = word_tokenizer(**special)
    tokens, num_cut = side_tokens(tokenizer, " ".join(prompt), " ".join(completion), limit)
    whole, _ = side_tokens(tokenizer, " ".join(prompt), " ".join(completion), 10_000)
    assert len(tokens) == min(limit, len(whole))
    assert num_cut == len(whole) - len(tokens)
    first, last = tokens[0], tokens[-1]
    assert (first, last) == (whole[0], whole[-1])  # specials stay
    kept_completion = [token for token in tokens if token in set(completion)]
    assert kept_completion == completion[: len(kept_completion)]
    before = [token for token in tokens[1:-1] if token not in set(completion)]
    assert before == whole[1 : 1 + num_prompt + 4][len(whole[1 : 1 + num_prompt + 4]) - len(before) :]
    if num_cut and len(kept_completion) < num_completion:
        assert len(before) <= max(limit // 4, 1)  # the completion is cut only once the prompt is down to its share


@pytest.fixture(scope="module")
def chat(tiny_folder):
    return AutoTokenizer.from_pretrained(tiny_folder)


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=60).filter(
    lambda text: not is_blank(text)
)


@pytest.mark.parametrize("special", [CAUSAL, ENCODER])
def test_a_template_alone_says_which_special_tokens_there_are(special):
    tokenizer = word_tokenizer(**special)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (side,) = Renderer(tokenizer, Rendering("chat", 64)).tokenize_sides([("w1 w2", "w3")])
    assert tokenizer.convert_ids_to_tokens(side.ids) == ["w1", "w2", "w3"]


def test_each_side_of_a_pair_is_that_of_its_own_text(chat):
    renderer = Renderer(chat, Rendering("chat", 512))
    texts = [("sum", "4", "5"), ("sum", "five", "four"), ("hi", "yes?", "no")]
    pairs = renderer.tokenize_pairs([PreferencePair(*one) for one in texts])
    for (prompt, chosen, rejected), pair in zip(texts, pairs, strict=True):
        assert [pair.chosen, pair.rejected] == renderer.tokenize_sides([(prompt, chosen), (prompt, rejected)])


@pytest.mark.slow
@given(
    sides=st.lists(st.tuples(TEXT, TEXT | st.just("again")), min_size=1, max_size=6),
    limit=st.sampled_from([24, 40, 512]),
    form=st.sampled_from(["chat", "plain"]),
)
def test_sides_are_what_the_tokenizer_gives_for_the_rendered_text_wherever_they_stand(chat, sides, limit, form):
    renderer = Renderer(chat, Rendering(form, limit))
    together = renderer.tokenize_sides(sides + sides[:2])
    for (prompt, completion), side in zip(sides + sides[:2], together, strict=True):
        whole = chat(renderer.render(prompt, completion), add_special_tokens=form == "plain").input_ids
        if form == "plain" and whole[-1] != chat.eos_token_id:
            whole.append(chat.eos_token_id)
        assert len(side.ids) == min(limit, len(whole))
        assert side.num_cut == len(whole) - len(side.ids)
        assert side == renderer.tokenize_sides([(prompt, completion)])[0]
        if not side.num_cut:
            assert side.ids == whole


def test_a_checkpoint_whose_template_is_gone_and_a_limit_with_no_room_for_text_are_refused():
    with pytest.raises(DataError, match="no room"):
        side_tokens(word_tokenizer(**CAUSAL), "w1 w2 w3", "w4", limit=3)
    with pytest.raises(ModelError, match="chat_template"):
        Renderer(word_tokenizer(**CAUSAL), Rendering("chat", 64))


def trimming(chat):
    """The tiny tokenizer with a template that strips each content and knows no system turn, as Gemma's."""
    tokenizer = copy.copy(chat)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    )
    return tokenizer


@pytest.mark.parametrize("completion", ["yes ", " yes", "yes", "\nyes\n"])
def test_a_completion_is_found_where_it_stands_though_it_also_stands_early_in_the_prompt(chat, completion):
    """A template that strips leaves the other form behind, in what the prompt quotes."""
    tokenizer, limit = trimming(chat), 48
    prompt = f"Say {completion} or no. " + "one two three " * 60
    (side,) = Renderer(tokenizer, Rendering("chat", limit)).tokenize_sides([(prompt, completion)])
    (whole,) = Renderer(tokenizer, Rendering("chat", 4000)).tokenize_sides([(prompt, completion)])
    assert side.ids == whole.ids[-limit:]  # all that was cut is prompt
    assert tokenizer.decode(side.ids).endswith("<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n")


def test_a_pair_that_cannot_be_read_is_set_aside_with_its_reason_and_the_others_are_read(chat):
    renderer = Renderer(trimming(chat), Rendering("chat", 64))
    good = [PreferencePair(f"prompt {number}", "a", "b") for number in range(3)]
    system = PreferencePair((Message("system", "be brief"), Message("user", "hi")), "c", "d", pair_id="bad")
    read = renderer.tokenize_readable([good[0], system, *good[1:]])
    assert read.pairs == good
    assert read.tokenized == renderer.tokenize_pairs(good)
    assert [(pair.pair_id, "no system turn" in pair.reason) for pair in read.dropped] == [("bad", True)]
    with pytest.raises(DataError, match="no system turn"):
        renderer.tokenize_pairs([*good, system])
    with pytest.raises(DataError, match=r"none of the 2 pairs can be read .*no system turn"):
        renderer.tokenize_readable([system, system])


def test_a_side_that_a_slow_tokenizer_cannot_cut_is_set_aside_and_the_others_are_read():
    renderer = Renderer(ByT5Tokenizer(), Rendering("plain", 40))
    good, long = PreferencePair("hi", "a", "b"), PreferencePair("hi", "a" * 90, "b", pair_id="long")
    read = renderer.tokenize_readable([long, good])
    assert read.pairs == [good]
    assert [(one.pair_id, "this tokenizer is a slow one" in one.reason) for one in read.dropped] == [("long", True)]
