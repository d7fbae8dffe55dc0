"""The Markdown summary: verdict, numbers and places, whatever the texts hold."""

import report_sample as sample
from rmcore.reporting.figures import numbers
from rmcore.reporting.html import benchmarks
from rmcore.reporting.html.blocks import escape
from rmcore.reporting.html.cards import headline_cards
from rmcore.reporting.html.logged import HEADINGS, TITLE
from rmcore.reporting.html.summary import summary_markdown


def test_verdict_numbers_reasons_and_paths():
    results = sample.results()
    text = summary_markdown(results)
    assert text.startswith(f"# {results['verdict']['headline']}")
    assert numbers.percent(0.712) in text
    assert numbers.interval(results["metrics"]["pairwise_accuracy"], "share") in text
    for stage in results["stages"]:
        assert escape(stage["path"]) in text
    for reason in results["verdict"]["reasons"]:
        assert f"- {reason}" in text


def test_tables_keep_their_columns_whatever_the_texts_hold():
    results = sample.results()
    results["stages"][0] |= {"name": "a|b\n`c`", "path": "/x|y`z"}
    results["run_name"] = "<b>[x](y)\n# not a heading"
    text = summary_markdown(results)
    tables = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {4, 1 + len(HEADINGS), 1 + len(benchmarks.HEADINGS)}
    headings = ["What speaks against it", "Next step", benchmarks.TITLE, TITLE, "Artifacts"]
    assert [line for line in text.splitlines() if line.startswith("#")][1:] == [f"## {one}" for one in headings]
    assert "<b>" not in text.replace("\\<b\\>", "")


def test_cards_say_what_is_missing():
    results = sample.results() | {"policy": None}
    results["metrics"] = {"pairwise_accuracy": sample.metric(0.7, None, reason="only one prompt")}
    cards = headline_cards(results)
    assert len(cards) == 4
    assert (cards[0].value, cards[0].interval) == (numbers.percent(0.7), "only one prompt")
    assert (cards[1].value, cards[1].interval) == (numbers.MISSING, "not measured")
    assert all(card.definition for card in cards)
