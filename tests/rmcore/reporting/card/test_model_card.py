"""A card as programs read it: whose it is, and whether somebody has changed it since."""

import pytest
from huggingface_hub import EvalResult
from hypothesis import given
from hypothesis import strategies as st

from rmcore.reporting.card.evidence import Found, Judgement
from rmcore.reporting.card.model_card import REPOSITORY, Example, Facts, name_repository, read_card, write_card

PART = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,40}", fullmatch=True)
FACTS = Facts(
    name="judge", digest="a" * 64, architecture="LlamaForSequenceClassification", num_parameters=10, rendering="chat",
    max_seq_len=128, beta=1.0, token_ids="ids = tokenizer(prompt)", example=Example("2 + 2?", "4", 0.5),
)  # fmt: skip


def written(headline="It passes"):
    judgement = Judgement(1, "passes", headline, "pairs", (), None, (), None, None, None, "a file")
    measured = {
        "metric_value": 0.1234, "metric_args": {"ci_low": 0.1, "ci_high": 0.2, "level": 0.95, "n": 30},
        "metric_type": "accuracy", "metric_name": "Score", "task_type": "text-classification",
    }  # fmt: skip
    results = tuple(EvalResult(dataset_type=f"a/{name}", dataset_name=name, **measured) for name in ("2024-01-01", "x"))
    return write_card(FACTS, [Found(results=results, judgement=judgement)], made="2026-11-25T00:00:00+00:00")


@pytest.mark.slow
@given(PART, PART, st.text(max_size=30))
def test_a_card_that_names_its_repository_is_as_written(owner, name, headline):
    text = written(headline)
    named = name_repository(text, f"{owner}/{name}")
    assert read_card(text).is_as_written
    assert read_card(named).is_as_written
    assert f'NAME = "{owner}/{name}"' in named
    assert REPOSITORY not in named or REPOSITORY in f"{owner}/{name}"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + "Our data are from our shop.\n",
        lambda text: text.replace("---\n", "---\nlicense: apache-2.0\n", 1),
        lambda text: text.replace("- preference\n", ""),
        lambda text: text.replace("status: passes", "status: ready"),
    ],
)
def test_a_card_that_was_changed_counts_as_changed_under_its_name_too(change):
    changed = change(written())
    assert changed != written()
    assert not read_card(changed).is_as_written
    assert not read_card(name_repository(changed, "alice/judge")).is_as_written


@pytest.mark.parametrize("content", ["# Mon modèle".encode("latin-1"), b"# mine", b""])
def test_what_is_no_card_of_ours_is_none(content):
    assert read_card(content) is None


def test_bytes_and_other_line_ends_are_the_same_card():
    assert read_card(written().replace("\n", "\r\n").encode()) == read_card(written())
