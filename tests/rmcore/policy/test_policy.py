"""A policy reads prompts by its own template and tokenizer, and what is no policy is refused."""

import json
import shutil
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, PreTrainedTokenizerFast

import small_policies as policies
from rmcore.core.errors import DataError, ModelError
from rmcore.data.pair import Message
from rmcore.policy.policy import Policy, TextReader

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=30)
TURNS = st.lists(
    st.builds(Message, st.sampled_from(["user", "assistant"]), TEXTS, st.just("")), min_size=1, max_size=4
).map(tuple)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return policies.new_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(folder):
    return Policy.load(folder)


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def change_json(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@given(prompt=TEXTS | TURNS)
def test_a_prompt_is_its_turns_and_the_opening_of_the_answer(policy, prompt):
    turns = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    told = "".join(f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in turns)
    text = policy.tokenizer.decode(policy.prompt_ids(prompt), skip_special_tokens=False)
    assert text == unicodedata.normalize("NFC", told + "<|im_start|>assistant\n")


@given(text=TEXTS)
def test_a_response_is_read_back_as_it_was_written(policy, text):
    ids = policy.tokenizer(text)["input_ids"]
    assert policy.decode([*ids, policy.tokenizer.eos_token_id]) == unicodedata.normalize("NFC", text)


@given(
    typed=st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<pad>", "system\n", "a"]), min_size=1).map("".join)
)
def test_what_a_user_types_is_text_to_a_policy_too(policy, typed):
    ids = policy.prompt_ids(typed)
    control = {0, 1, 2}
    assert [one for one in ids if one in control] == [one for one in policy.prompt_ids("a") if one in control]
    told = f"<|im_start|>user\n{typed}<|im_end|>\n<|im_start|>assistant\n"
    assert policy.tokenizer.decode(ids, skip_special_tokens=False) == told
    assert not control & set(policy.reader.response_ids(typed))
    assert policy.decode(policy.reader.response_ids(typed)) == typed


WORDS = ["Prompt", "Response", ":", "user", "one", "two"]


def word_tokenizer(around, template=None):
    """Whitespace words; `around` says which special tokens the tokenizer itself puts around a text."""
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = [(token, vocabulary[token]) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=specials)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)


@pytest.mark.parametrize("around", ["$A", "<s> $A", "<s> $A </s>"])
def test_without_a_template_the_default_text_follows_what_the_tokenizer_puts_before_it(around):
    tokenizer = word_tokenizer(around)
    words = tokenizer.convert_ids_to_tokens(TextReader(tokenizer).prompt_ids("one two"))
    assert words == [*(["<s>"] if "<s>" in around else []), "Prompt", ":", "one", "two", "Response", ":"]


@pytest.mark.parametrize("opening", ["", "<s> ", "<s> <s> "])
def test_a_template_says_alone_what_stands_before_the_text_and_never_two_bos(opening):
    template = opening + "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}Response :"
    tokenizer = word_tokenizer("<s> $A </s>", template)
    words = tokenizer.convert_ids_to_tokens(TextReader(tokenizer).prompt_ids("one"))
    assert words == [*(["<s>"] if opening else []), "user", ":", "one", "Response", ":"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{{ raise_exception('roles must alternate') }}", "roles must alternate"), ("{{ 1 / 0 }}", "division by zero")],
)
def test_a_dialogue_that_the_template_refuses_is_said(template, reason):
    tokenizer = word_tokenizer("$A", template)
    with pytest.raises(DataError, match=rf"roles \['user', 'user'\] .*{reason}"):
        TextReader(tokenizer).prompt_ids((Message("user", "one"), Message("user", "two")))


@pytest.mark.parametrize("num_tokens", [1, 1013])
def test_room_for_the_response_is_all_that_is_asked_for(policy, num_tokens):
    prompt = "one " * 400
    room = policy.config.max_position_embeddings - len(policy.prompt_ids(prompt))
    if num_tokens <= room:
        assert policy.fitting_ids([prompt], num_tokens) == [policy.prompt_ids(prompt)]
    else:
        with pytest.raises(DataError, match=r"1 of 2 prompts cannot .* prompt 1: 'one one.* too long .* 1024"):
            policy.fitting_ids(["", prompt], num_tokens)
    with pytest.raises(DataError):
        policy.fitting_ids([prompt], room + 1)


def test_whatever_says_how_a_response_ends_is_heard(copied):
    assert Policy.load(copied).stop_ids == (2,)
    change_json(copied / "generation_config.json", eos_token_id=[2, 40, 41])
    change_json(copied / "config.json", eos_token_id=7)
    assert Policy.load(copied).stop_ids == (2, 7, 40, 41)


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", "tiny", "no-such-model-on-any-hub"])
def test_what_is_not_there_is_said(name):
    with pytest.raises(ModelError, match=r"no folder|untrained|could not be loaded"):
        Policy.load(name)


UNUSABLE = {
    "an encoder": (
        lambda folder: BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(folder),
        "no causal language model: its architecture is BertForMaskedLM",
    ),
    "a reward model": (
        lambda folder: change_json(folder / "config.json", architectures=["Qwen2ForSequenceClassification"]),
        "is a classifier.*Name a causal language model",
    ),
    "adapters": (lambda folder: (folder / "adapter_config.json").write_text("{}"), "merge_and_unload"),
    "a larger model's tokenizer": (
        lambda folder: change_json(folder / "config.json", vocab_size=300), "the model knows 300 tokens"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_folder_that_holds_something_else_is_refused(kind, copied):
    change, words = UNUSABLE[kind]
    change(copied)
    with pytest.raises(ModelError, match=words):
        Policy.load(copied).fitting_ids(["What is 2 + 2?"], 8)
