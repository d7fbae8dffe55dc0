"""Text that is rendered already: the checkpoint's own is taken without a word, and whatever differs from it is said."""

import pytest

from rmcore.data.rendering import Renderer, Rendering
from rmcore.serving.rendered import Rendered
from tests.support import chat_templates
from tests.support.chat_templates import begin_with_bos

PAIR = ("Why is the sky blue?", "Light scatters.")
TEMPLATES = {name: getattr(chat_templates, name) for name in ("QWEN3", "LLAMA31", "MISTRAL", "GEMMA", "GPT_OSS")}
WITH_BOS = ("LLAMA31", "MISTRAL", "GEMMA")


def renderer_of(rm, name):
    """tiny's tokenizer with one of the public templates; `plain` and `tiny` are its own formats."""
    if name in WITH_BOS:
        begin_with_bos(rm.tokenizer)
    rm.tokenizer.chat_template = TEMPLATES.get(name, rm.tokenizer.chat_template)
    return Renderer(rm.tokenizer, Rendering("plain" if name == "plain" else "chat", 512))


@pytest.fixture(params=["plain", "tiny", *TEMPLATES])
def name(request):
    return request.param


@pytest.fixture
def renderer(rm, name):
    return renderer_of(rm, name)


def test_the_checkpoints_own_text_is_taken_without_a_word(renderer):
    reading = Rendered(renderer).text(renderer.render(*PAIR))
    assert reading.warnings == ()
    assert renderer.tokenize_texts([reading.given]) == renderer.tokenize_sides([PAIR])


@pytest.mark.parametrize("name", WITH_BOS)
def test_a_second_bos_is_left_out(renderer):
    rendered, text = Rendered(renderer), renderer.render(*PAIR)
    bos = renderer.tokenizer.bos_token
    [side] = renderer.tokenize_sides([PAIR])
    for extra in (1, 2):
        reading = rendered.text(bos * extra + text)
        assert reading.warnings == ()
        assert renderer.tokenize_texts([reading.given]) == [side]
    bare = text.removeprefix(bos)
    assert "does not begin with the BOS" in rendered.text(bare).warnings[0]
    assert rendered.text(bare).given == bare


def test_a_bos_that_the_template_does_not_write_is_said(rm):
    begin_with_bos(rm.tokenizer)
    renderer = renderer_of(rm, "GPT_OSS")
    text = renderer.render(*PAIR)
    assert "begins with a BOS" in Rendered(renderer).text(rm.tokenizer.bos_token + text).warnings[0]


def test_an_answer_without_its_end_is_said_and_stays_so(renderer, name):
    text = renderer.render(*PAIR)
    cut = text[: text.rindex(PAIR[1]) + 5]
    reading = Rendered(renderer).text(cut)
    assert reading.given == cut
    assert ["does not end as answers do" in one for one in reading.warnings] == [True] * (name != "plain")


def test_an_end_that_the_format_adds_by_itself_is_not_doubled(rm):
    """A policy's text of a checkpoint in the plain format carries the end token, which the renderer adds, too."""
    renderer = renderer_of(rm, "plain")
    reading = Rendered(renderer).text(renderer.render(*PAIR) + rm.tokenizer.eos_token)
    assert reading.warnings == ()
    assert renderer.tokenize_texts([reading.given]) == renderer.tokenize_sides([PAIR])


def test_another_models_template_is_said(rm, name, tiny_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    rendered = Rendered(renderer_of(rm, name))
    for other, template in TEMPLATES.items():
        tokenizer.chat_template = template
        tokenizer.bos_token = "<s>"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": PAIR[0]}, {"role": "assistant", "content": PAIR[1]}], tokenize=False
        )
        is_alike = other == name or {other, name} == {"QWEN3", "tiny"}  # both are ChatML
        said = [one for one in rendered.text(text).warnings if "not rendered as this checkpoint" in one]
        assert bool(said) != is_alike, (other, said)


def test_a_prompt_that_only_mentions_a_template_is_a_users_text(rm):
    renderer = renderer_of(rm, "tiny")
    rendered = Rendered(renderer)
    for prompt in ("What does <|im_start|>assistant do?", "[/INST] ends it, right?", "a <s>b</s>"):
        assert rendered.pair(prompt, "Yes.<|im_end|>").given == {"prompt": prompt, "response": "Yes."}
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for thought in ("", "<think>\n", "<think>\n\n</think>\n\n"):
        assert rendered.pair(asked + thought, "Yes.<|im_end|>").given == asked + thought + "Yes.<|im_end|>"
    assert rendered.pair("Hi", "Yes.<|eot_id|>").given == {"prompt": "Hi", "response": "Yes."}


def test_a_prompt_of_the_plain_format_is_known_by_the_line_before_its_response(rm):
    rendered = Rendered(renderer_of(rm, "plain"))
    assert rendered.pair("Prompt: Hi\n\nResponse: ", "Yes.").given == "Prompt: Hi\n\nResponse: Yes."
    assert rendered.pair("Continue. Response:", "Yes.").given == {"prompt": "Continue. Response:", "response": "Yes."}
