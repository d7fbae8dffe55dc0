"""Which characters of a completion the tokens of a side stand for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from rmcore.core.errors import DataError
from rmcore.data.pair import Message
from rmcore.data.render_fn import RenderFn
from rmcore.data.rendering import Renderer, Rendering
from rmcore.models.tiny import tiny_tokenizer

TEXT = st.text(st.sampled_from("abc XY.\n 3é好"), min_size=1, max_size=40)


def rendering(format, limit):
    function = RenderFn("own:render", lambda prompt, completion: f"<pad>{prompt}: {completion}\n--")
    custom = function if format == "custom" else None
    tokenizer = tiny_tokenizer()
    if format == "custom":
        tokenizer.bos_token = "<pad>"  # a BOS that the text brings itself
    return Renderer(tokenizer, Rendering(format, limit, custom and custom.name), custom)


RENDERERS = {(format, limit): rendering(format, limit) for format in ("plain", "chat", "custom") for limit in (24, 256)}


@given(st.sampled_from(sorted(RENDERERS)), TEXT, TEXT)
def test_each_token_stands_for_its_own_characters(which, prompt, completion):
    renderer = RENDERERS[which]
    placed = renderer.place_side(prompt, completion)
    assert [placed.side] == renderer.tokenize_sides([(prompt, completion)])
    assert len(placed.places) == len(placed.side.ids)
    found = [(token, place) for token, place in zip(placed.side.ids, placed.places, strict=True) if place is not None]
    assert [place for _, place in found] == sorted(place for _, place in found)
    backend = renderer.tokenizer.backend_tokenizer
    for token, (start, end) in found:
        written = backend.decoder.decode([backend.id_to_token(token)])
        assert "\ufffd" in written or completion[start:end].strip() in written
    read = {at for _, (start, end) in found for at in range(start, end)}
    whole = {at for at, character in enumerate(completion) if not character.isspace()}
    assert placed.end == max(read, default=-1) + 1
    if placed.side.num_cut:
        assert {at for at in whole if at < placed.end} <= read
    else:
        assert whole <= read


def test_a_cut_completion_ends_where_the_model_stops_reading():
    renderer = rendering("chat", 24)
    completion = " ".join(["apples"] * 40)
    placed = renderer.place_side("Which?", completion)
    kept = renderer.tokenizer.decode(placed.side.ids)
    assert placed.side.num_cut > 0
    assert 0 < placed.end < len(completion)
    assert kept.count("apples") == completion[: placed.end].count("apples")


def test_control_strings_in_data_and_what_a_template_strips_do_not_move_the_places():
    renderer = rendering("chat", 256)
    completion = "an <|im_end|> in text, and apples"
    placed = renderer.place_side((Message("user", "say <|im_start|>"),), completion)
    ids = [token for token, place in zip(placed.side.ids, placed.places, strict=True) if place is not None]
    assert renderer.tokenizer.decode(ids) == completion
    assert placed.end == len(completion)
    renderer.tokenizer.chat_template = "{% for one in messages %}{{ one['content'].strip() }}|{% endfor %}"
    placed = renderer.place_side("Which?", "  apples  ")
    assert (next(place for place in placed.places if place), placed.end) == ((2, 3), 8)


def test_a_side_that_cannot_be_read_is_the_renderers_error():
    def fail(prompt, completion):
        raise ValueError("no")

    renderer = Renderer(tiny_tokenizer(), Rendering("custom", 64, "own:fail"), RenderFn("own:fail", fail))
    with pytest.raises(DataError, match="no"):
        renderer.place_side("Which?", "This.")
    slow = Renderer(ByT5Tokenizer(), Rendering("plain", 64))
    with pytest.raises(DataError, match=r"slow one.*fast version"):
        slow.place_side("Which?", "This.")
