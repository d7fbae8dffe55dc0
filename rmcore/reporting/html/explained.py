"""The section of the report on why the model makes its worst mistakes, and the page of `rm-opt explain`.

An answer is shown whole, its parts coloured by what they add to its reward: blue raises, orange lowers, stronger is
more. Numbers are next to the colours, so that nothing is said by colour alone.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.html.blocks import Block, Named, Table
from rmcore.reporting.html.page import shorten, write_page

TITLE = "Mistakes explained: words and edits behind them"
OF_ONES_OWN = "Words and edits behind a reward"
TEMPLATE = "explain.html.j2"
RAISES, LOWERS = "0, 114, 178", "213, 94, 0"
"""Red, green, blue of Okabe and Ito's blue and vermilion, which colour-blind readers tell apart."""
STRONGEST = 0.55
"""Opacity of the largest effect of a pair: the text stays readable on it."""
NAMED_SHARE = 0.15
"""Effects of at least this share of the pair's largest one are shown with their number."""
AROUND = 8
"""Words on each side of an edit that are shown."""
SIDES = {"chosen": "labelled better (chosen)", "rejected": "labelled worse (rejected)"}


def write_explanation(record: Mapping[str, Any], out: Path) -> Path:
    """Write the page of `rm-opt explain` to `out`; returns `out`.

    Args:
        record: of `rmcore.explain.record.Explained`, with `title` and `subtitle`.
        out: HTML file to write; its folder is made.
    """
    block = explained_block(record)
    values = {"title": record["title"], "subtitle": record["subtitle"], "block": block, "explained": answers(record)}
    return write_page(TEMPLATE, values, {}, {}, out)


def explained_block(record: Mapping[str, Any]) -> Block:
    """How many mistakes there are, and their kinds; the page shows the answers below it.

    Args:
        record: of `rmcore.explain.record.Explained`.
    """
    title, finding = OF_ONES_OWN if record["num_pairs"] is None else TITLE, _finding(record)
    grouped = sum(len(kind["members"]) for kind in record["kinds"])
    rows = [_kind(kind, place, grouped) for place, kind in enumerate(record["kinds"], 1)]
    tables = (Table(("kind", "share of them", "what sets it apart"), rows, left=(0, 2)),) if rows else ()
    kinds = Block("Kinds of mistakes", text=(record["kinds_note"],), tables=tables)
    return Block(
        title,
        text=(f"{finding} No verdict follows from it.",) if finding else (),
        parts=(kinds,) if record["kinds_note"] else (),
    )


def answers(record: Mapping[str, Any]) -> dict[str, Any]:
    """The explained pairs and answers as the page prints them, numbers as text."""
    return {
        "pairs": [_pair(pair) for pair in record["pairs"]],
        "answers": [_lone_answer(answer) for answer in record["answers"]],
    }


def _finding(record: Mapping[str, Any]) -> str:
    if record["num_pairs"] is None:
        return ""
    number, shown = record["num_mistakes"], len(record["pairs"])
    share = numbers.percent(number / record["num_pairs"])
    are = "is" if shown == 1 else "are"
    told = (
        f"the {shown} with the largest wrong margins, one a prompt, {are} explained below. A label may be what is wrong"
    )
    return (
        f"{numbers.count(number)} of {numbers.count(record['num_pairs'])} held-out pairs ({share}) are ranked against "
        f"their label; {told if shown else 'none is left to explain'}."
    )


def _kind(kind: Mapping[str, Any], place: int, total: int) -> tuple[str | Named, ...]:
    members = len(kind["members"])
    told = {
        "the model prefers answers with": kind["model_words"],
        "the labels prefer answers with": kind["label_words"],
        "prompts are about": kind["prompt_words"],
    }
    lines = [f"{text} {', '.join(map(_word, words))}" for text, words in told.items() if words]
    lines = lines or ["no word stands out"]
    lines.append(f"in {numbers.percent(kind['longer'])} the model prefers the longer answer")
    if kind["subsets"]:
        shown = ", ".join(f"{name} ({count})" for name, count in kind["subsets"][:4])
        lines.append(f"subsets: {shown}{', …' if len(kind['subsets']) > 4 else ''}")
    size = f"{numbers.count(members)} pairs of {numbers.count(kind['num_prompts'])} prompts"
    return Named(f"Kind {place}", size), numbers.percent(members / total), "\n".join(lines)


def _word(word: Mapping[str, Any]) -> str:
    return f"{word['word']} ({word['num']} : {word['against']})"


def _pair(pair: Mapping[str, Any]) -> dict[str, Any]:
    largest = _largest(one["share"] for side in SIDES for one in pair[side]["sentences"]["spans"])
    return {
        "pair_id": pair["pair_id"],
        "margin": _signed(pair["margin"]),
        "kind": "" if pair["kind"] is None else f"kind {pair['kind'] + 1}",
        "prompt": shorten(pair["chosen"]["prompt"]),
        "sides": [{"label": label, **_answer(pair[side], largest)} for side, label in SIDES.items()],
        "turn": _turn(pair),
    }


def _lone_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    largest = _largest(one["share"] for one in answer["sentences"]["spans"])
    return {"label": "answer", "prompt": shorten(answer["prompt"]), **_answer(answer, largest)}


def _answer(answer: Mapping[str, Any], largest: float) -> dict[str, Any]:
    sentences, words, text = answer["sentences"], answer["words"], answer["text"]
    most = _largest(one["share"] for one in words["spans"])
    spans = sentences["spans"]
    empty = f"the answer “{sentences['empty']}”" if sentences["empty"] else "an empty answer"
    added = sum(one["share"] for one in spans)
    return {
        "reward": _signed(answer["reward"]),
        "sentences": coloured(text, spans, largest),
        "words": coloured(text, words["spans"], most),
        "check": (
            f"From {empty} ({_signed(sentences['base'])}) the parts add {_signed(added)}; "
            f"{_signed(sentences['interaction'])} is of three or more parts together."
        ),
        "cut": f"{numbers.count(sentences['num_cut'])} tokens are beyond what the model reads."
        if sentences["num_cut"]
        else "",
    }


def _largest(effects: Iterable[float]) -> float:
    return max(map(abs, effects), default=0.0)


def coloured(text: str, spans: Sequence[Mapping[str, Any]], largest: float) -> list[dict[str, str]]:
    """Cut a text into pieces with a background each and, where an effect is large, its number.

    Args:
        text: the answer.
        spans: they tile it: start, end, share in logits, seen.
        largest: the effect that has the strongest colour, in logits.
    """
    pieces = []
    for one in spans:
        share = one["share"] / largest if largest > 0 else 0.0
        colour = RAISES if share > 0 else LOWERS
        whole = text[one["start"] : one["end"]]
        part = whole.rstrip()
        pieces.append(
            {
                "text": part,
                "gap": whole[len(part) :],
                "style": f"background: rgba({colour}, {STRONGEST * abs(share):.3f})" if one["seen"] else "",
                "number": _signed(one["share"]) if one["seen"] and abs(share) >= NAMED_SHARE else "",
                "unseen": "" if one["seen"] else "unseen",
            }
        )
    return pieces


def _turn(pair: Mapping[str, Any]) -> dict[str, Any]:
    found = pair["counterfactual"]
    edit = found["edit"]
    if found["margin"] == 0:
        return {"text": "The model prefers neither answer, so there is nothing to turn.", "changes": []}
    if edit is None:
        return {"text": f"None of {found['num_tried']} edits moves the margin towards the other answer.", "changes": []}
    what = f"{edit['rule']} ({edit['meaning']}) on the answer {SIDES[edit['edited']]}, {_words(edit['num_words'])}"
    moved = f"margin {_signed(found['margin'])} → {_signed(edit['margin'])}"
    if found["turned"]:
        told = f"The smallest of {found['num_turning']} edits (of {found['num_tried']} tried) that turn the preference"
    else:
        told = f"None of {found['num_tried']} edits turns the preference; the one that moves it farthest"
    return {"text": f"{told}: {what}, {moved}.", "changes": changes(pair[edit["edited"]]["text"], edit["text"])}


def _words(number: int) -> str:
    return "1 word" if number == 1 else f"{numbers.count(number)} words"


def changes(before: str, after: str) -> list[dict[str, str]]:
    """Show what an edit changed, word by word, with some words around: pieces with a tag (del, ins or none)."""
    old, new = before.split(), after.split()
    pieces: list[dict[str, str]] = []

    def add(tag: str, words: Sequence[str]) -> None:
        if words:
            pieces.append({"tag": tag, "text": " ".join(words)})

    opcodes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    for place, (tag, i1, i2, j1, j2) in enumerate(opcodes):
        if tag != "equal":
            add("del", old[i1:i2])
            add("ins", new[j1:j2])
            continue
        first, last = place == 0, place == len(opcodes) - 1
        head = 0 if first else AROUND
        tail = 0 if last else AROUND
        if i2 - i1 <= head + tail:
            add("", old[i1:i2])
        else:
            add("", old[i1 : i1 + head])
            add("", ["…"])
            add("", old[i2 - tail : i2] if tail else [])
    return pieces


def _signed(value: float) -> str:
    told = numbers.decimal(value)
    return f"+{told}" if value > 0 and told != "0" else told
