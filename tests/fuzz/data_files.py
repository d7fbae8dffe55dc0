"""Files of known pairs, written in some format and layout, then re-encoded without harm or damaged in one place.

Re-encoded, they give the same pairs. Damaged, they are refused, or rows are set aside: what is read are true pairs. A
text format, or Parquet without checksums, cannot know that a letter inside a text or a digit of a rank was another one,
so one pair may differ from a true one by that, or be turned.
"""

import csv
import difflib
import gzip
import io
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

WORDS = ("tea", "zwölf", "中文", "🙂", *map(chr, b"\"',;\\\t\n<%#{"), "\u2028", "\u200b")
MOST_DROPPED = 3
FEW = 8
"""Characters of one text by which a damage of a byte, or of three, may change it."""


class SilentDifference(Exception):
    """What was read is not what was written, without a word."""


def default_count() -> int:
    """Return how many cases `make fuzz` tries."""
    return 500


def one(draw: random.Random, place: Path) -> str:
    """Write one file and read it; "same", "subset" of the pairs, or "refused"."""
    from rmcore.core.errors import DataError
    from rmcore.data.readers.sources import load_pairs

    pairs = _pairs(draw)
    layout, kind = draw.choice(sorted(_LAYOUTS)), draw.choice(("jsonl", "json", "csv", "tsv", "parquet"))
    if layout in ("dialogue", "ranked") and kind in ("csv", "tsv"):
        kind = "jsonl"
    damaged, gzipped = draw.random() < 0.6, kind != "parquet" and draw.random() < 0.2
    content = _encode(_LAYOUTS[layout](pairs, draw), kind, draw, plain=damaged)
    if gzipped:
        content = gzip.compress(content)
    spot = draw.randrange(len(content))
    hits_a_digit = damaged and any(48 <= byte <= 57 for byte in content[spot : spot + MOST_DROPPED])
    if damaged:
        content = _damage(content, spot, draw)
    file = place / f"{layout}.{kind}{'.gz' if gzipped else ''}"
    file.write_bytes(content)
    try:
        loaded = load_pairs(str(file))
    except DataError as error:
        if not damaged:
            raise SilentDifference(f"{file.name} is whole and refused: {error}") from error
        if len(str(error)) < 20:
            raise SilentDifference(f"refused without a sentence: {error}") from error
        return "refused"
    found = [(_text(pair.prompt), str(pair.chosen), str(pair.rejected)) for pair in loaded.pairs]
    if not damaged and found != pairs:
        raise SilentDifference(f"{file.name} is whole, and gives {len(found)} pairs that are not its {len(pairs)}")
    turned = [(prompt, no, yes) for prompt, yes, no in pairs] if layout == "ranked" and hits_a_digit else []
    unknown = [pair for pair in found if pair not in pairs]
    if len(unknown) > (0 if gzipped else 1) or not all(_is_near(one, pairs + turned) for one in unknown):
        raise SilentDifference(f"{file.name}: {len(unknown)} pairs were never written, such as {unknown[0]!r:.300}")
    return "same" if found == pairs else "subset"


def _pairs(draw: random.Random) -> list[tuple[str, str, str]]:
    def text(start: str) -> str:
        return " ".join([start, *draw.choices(WORDS, k=draw.randint(0, 9)), "end"])

    return [(text(f"Ask {n}"), text(f"Yes {n}"), text(f"No {n}")) for n in range(draw.randint(6, 40))]


def _dialogue(pairs: list, draw: random.Random) -> list[dict]:
    def turns(prompt: str, answer: str) -> list[dict]:
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    return [{"chosen": turns(prompt, yes), "rejected": turns(prompt, no)} for prompt, yes, no in pairs]


def _two_answers(pairs: list, draw: random.Random) -> list[dict]:
    rows = []
    for prompt, yes, no in pairs:
        winner = draw.choice(("model_a", "model_b"))
        a, b = (yes, no) if winner == "model_a" else (no, yes)
        rows.append({"prompt": prompt, "response_a": a, "response_b": b, "winner": winner})
    return rows


def _one_row_a_side(pairs: list, draw: random.Random) -> list[dict]:
    """The two rows of a pair anywhere, but for the first ones, which are in the order of the pairs."""
    first, second = [], []
    for number, (prompt, yes, no) in enumerate(pairs):
        sides = [("chosen", yes), ("rejected", no)][:: draw.choice((1, -1))]
        rows = [{"pair_id": f"x{number}", "role": role, "prompt": prompt, "response": text} for role, text in sides]
        first.append(rows[0])
        second.append(rows[1])
    draw.shuffle(second)
    return first + second


_LAYOUTS = {
    "strict": lambda pairs, draw: [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs],
    "dialogue": _dialogue,
    "two_answers": _two_answers,
    "sides": lambda pairs, draw: [
        {"prompt": prompt, "completion": answer, "label": label}
        for prompt, yes, no in pairs
        for answer, label in ((yes, True), (no, False))
    ],
    "one_row_a_side": _one_row_a_side,
    "ranked": lambda pairs, draw: [
        {"prompt": prompt, "responses": [yes, no][::way], "ranks": [1, 2][::way]}
        for (prompt, yes, no), way in zip(pairs, draw.choices((1, -1), k=len(pairs)), strict=True)
    ],
}


def _encode(rows: list[dict], kind: str, draw: random.Random, *, plain: bool) -> bytes:
    """The rows in a format, by one of the ways in which programs write it."""
    if not plain and draw.random() < 0.3:
        rows = [row | {"note": f"n{number}"} for number, row in enumerate(rows)]
    if kind == "parquet":
        sink, packed, size = io.BytesIO(), draw.choice(("none", "snappy", "zstd", "gzip")), draw.choice((1, 5, 1000))
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, sink, compression=packed, row_group_size=size, write_page_checksum=True)
        return sink.getvalue()
    if kind in ("csv", "tsv"):
        out, ends = io.StringIO(newline=""), draw.choice(("\n", "\r\n"))
        delimiter = "\t" if kind == "tsv" else draw.choice((",", ";")) if not plain else ","
        quoting = csv.QUOTE_ALL if plain or draw.random() < 0.5 else csv.QUOTE_MINIMAL
        writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter, quoting=quoting, lineterminator=ends)
        writer.writeheader()
        writer.writerows(rows)
        text = out.getvalue()
    else:
        ascii_only, end = draw.random() < 0.5, draw.choice(("\n", "\r\n"))
        lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
        text = f"[{f',{end}'.join(lines)}]" if kind == "json" else end.join(lines) + draw.choice((end, ""))
        if kind == "jsonl" and not plain and draw.random() < 0.3:
            text = text.replace(end, 2 * end)
    mark = b"\xef\xbb\xbf" if not plain and draw.random() < 0.3 else b""
    return mark + text.encode()


def _damage(content: bytes, spot: int, draw: random.Random) -> bytes:
    """One damage at a place."""
    after = {
        "flip": bytes([content[spot] ^ 1 << draw.randrange(8)]) + content[spot + 1 :],
        "drop": content[spot + draw.randint(1, MOST_DROPPED) :],
        "insert": draw.choice((b'"', b"\n", b"\\", b",", b"{", b"}", b"\x00", b"\xff", b"]")) + content[spot:],
        "cut": b"",
    }
    return content[:spot] + after[draw.choice(sorted(after))]


def _text(prompt: object) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"] if len(prompt) == 1 else repr(prompt)


def _is_near(found: tuple, pairs: list[tuple]) -> bool:
    """Whether a pair is a true one but for a few characters in one of its texts."""

    def near(one: str, other: str) -> bool:
        blocks = difflib.SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
        return sum(block.size for block in blocks) >= max(len(one), len(other)) - FEW

    return any(all(near(one, other) for one, other in zip(found, pair, strict=True)) for pair in pairs)
