"""The four kinds of task of the synthetic benchmark: how each prompt is worded, read back, answered and judged.

arithmetic (a word problem), order (sorting), list (naming items of a topic) and lookup (a value from a small table).
Each class draws the fields of its templates, reads them back, writes answers of a wanted quality and assesses any
text as an answer. A prompt is a single user turn, a filled template and a style sentence, and `parse_prompt` inverts
exactly that, so that a response can be judged from the two texts alone. Templates, names and topics marked out of
distribution never occur in training prompts.
"""

import itertools
import random
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from rmcore.data.gold.grammar import (
    EQUATION,
    NUMBER,
    QUOTED,
    STYLES,
    Assessment,
    Template,
    keeps_list_style,
    other_list_style,
    stated_numbers,
    words_of,
    write_items,
)
from rmcore.data.gold.words import ALL_TOPICS, ITEMS, NAMES, NOUNS, OOD_NAMES, OOD_NOUNS, OOD_TOPICS, TOPICS


@dataclass(frozen=True)
class Arithmetic:
    """A sum, difference or (out of distribution) product in words; the hard part is the result."""

    name: ClassVar = "arithmetic"
    styles: ClassVar = ("steps", "sentence")
    templates: ClassVar = (
        Template("{name} has {a} {noun} and buys {b} more. How many {noun} does {name} have now?", "+"),
        Template("{name} had {a} {noun} and gave {b} away. How many {noun} are left?", "-"),
        Template("There are {a} {noun} in a box and {b} on the table. How many {noun} are there?", "+"),
        Template("{name} lost {b} of {a} {noun}. How many {noun} remain?", "-"),
        Template("{name} packs {a} bags with {b} {noun} each. How many {noun} is that?", "*", ood=True),
        Template("A shop sold {b} of its {a} {noun} today. How many {noun} does it still have?", "-", ood=True),
    )
    first: str
    operator: str
    second: str
    noun: str
    style: str

    @classmethod
    def draw_fields(cls, rng: random.Random, template: Template) -> dict[str, str]:
        """Random contents of a template's fields."""
        limit = 10 if template.kind == "*" else 60
        first = rng.randrange(4, limit)
        return {
            "name": rng.choice(OOD_NAMES if template.ood else NAMES),
            "noun": rng.choice(OOD_NOUNS if template.ood else NOUNS),
            "a": str(first),
            "b": str(rng.randrange(2, first)),
        }

    @classmethod
    def read(cls, template: Template, fields: dict[str, str], style: str) -> "Arithmetic | None":
        """The task behind the fields of a prompt."""
        return cls(fields["a"], template.kind, fields["b"], fields["noun"], style)

    @property
    def result(self) -> int:
        """The right answer."""
        first, second = int(self.first), int(self.second)
        return {"+": first + second, "-": first - second, "*": first * second}[self.operator]

    def assess(self, text: str) -> Assessment:
        """One claimed number, equal to the result; more than one different number is no answer."""
        claims = stated_numbers(text)
        has_equation = EQUATION.search(text) is not None
        return Assessment(
            relevance=float(self.noun in words_of(text)),
            completeness=float(bool(claims)),
            correctness=float(claims == {str(self.result)}),
            style=float(has_equation == (self.style == "steps")),
        )

    def write(self, rng: random.Random, *, correct: bool, complete: bool, styled: bool) -> str:
        """An answer of the asked-for quality."""
        if not complete:
            return rng.choice(("There are some {0}.", "The answer is a few {0}.")).format(self.noun)
        value = self.result if correct else max(0, self.result + rng.choice((-10, -3, -2, -1, 1, 2, 3, 10)))
        if not correct and value == self.result:
            value += 4
        ending = rng.choice(("The answer is {0} {1}.", "That makes {0} {1}.", "There are {0} {1}."))
        sentence = ending.format(value, self.noun)
        if styled == (self.style == "steps"):
            return f"{self.first} {self.operator} {self.second} = {value}. {sentence}"
        return sentence


@dataclass(frozen=True)
class Order:
    """Sorting numbers or words; the hard part is the order itself, judged by neighbours."""

    name: ClassVar = "order"
    styles: ClassVar = ("numbered", "commas")
    templates: ClassVar = (
        Template("Sort these numbers from small to large: {items}.", "up"),
        Template("Sort these numbers from large to small: {items}.", "down"),
        Template("Put these words in alphabetical order: {items}.", "words"),
        Template("Which order is right, from the lowest to the highest, for {items}?", "up", ood=True),
        Template("Arrange alphabetically the words {items}.", "words", ood=True),
    )
    given: tuple[str, ...]
    kind: str
    style: str

    @classmethod
    def draw_fields(cls, rng: random.Random, template: Template) -> dict[str, str]:
        """Random contents of a template's fields."""
        size = rng.randrange(3, 6)
        if template.kind != "words":
            return {"items": ", ".join(str(number) for number in rng.sample(range(1, 100), size))}
        topics = OOD_TOPICS if template.ood else TOPICS
        return {"items": ", ".join(rng.sample(topics[rng.choice(list(topics))], size))}

    @classmethod
    def read(cls, template: Template, fields: dict[str, str], style: str) -> "Order | None":
        """The task behind the fields of a prompt; None where the items cannot be sorted."""
        given = tuple(fields["items"].split(", "))
        proper = all(re.fullmatch("[a-z]+" if template.kind == "words" else NUMBER, item) is not None for item in given)
        return cls(given, template.kind, style) if proper and len(set(given)) == len(given) > 1 else None

    @property
    def result(self) -> list[str]:
        """The items in the right order."""
        if self.kind == "words":
            return sorted(self.given)
        return sorted(self.given, key=int, reverse=self.kind == "down")

    def assess(self, text: str) -> Assessment:
        """Share of neighbouring items in the right order, times the share of the given items that are there."""
        known = set(self.given) | ITEMS
        stated = [word for word in words_of(text) if (word in known if self.kind == "words" else word.isdigit())]
        found = set(stated) & set(self.given)
        completeness = len(found) / len(self.given)
        place = {item: index for index, item in enumerate(self.result)}
        steps = [place.get(b, -1) > place.get(a, len(place)) for a, b in itertools.pairwise(stated)]
        return Assessment(
            relevance=len(found) / max(len(stated), 1),
            completeness=completeness,
            correctness=completeness * sum(steps) / len(steps) if steps else 0.0,
            style=keeps_list_style(text, self.style),
        )

    def write(self, rng: random.Random, *, correct: bool, complete: bool, styled: bool) -> str:
        """An answer of the asked-for quality."""
        items = self.result
        if not correct:
            while items == self.result:
                rng.shuffle(items)
        if not complete:
            del items[rng.randrange(len(items))]
        style = self.style if styled else other_list_style(self.style)
        return rng.choice(("The order is {0}.", "Sorted: {0}.", "Here they are: {0}.")).format(
            write_items(items, style)
        )


@dataclass(frozen=True)
class Listing:
    """Naming exactly so many items of a topic without a forbidden one; the hard part is the count."""

    name: ClassVar = "list"
    styles: ClassVar = ("numbered", "commas")
    templates: ClassVar = (
        Template("Name {k} {topic}, but not {item}."),
        Template("Which {k} {topic} do you like, apart from {item}?"),
        Template("{name} is bored of {item}. Suggest {k} other {topic}."),
        Template("Leave out {item} and give me {k} {topic}.", ood=True),
        Template("{name} wants to hear about {k} {topic}. Never mention {item}.", ood=True),
    )
    topic: str
    count: int
    excluded: str
    style: str

    @classmethod
    def draw_fields(cls, rng: random.Random, template: Template) -> dict[str, str]:
        """Random contents of a template's fields."""
        topics = OOD_TOPICS if template.ood else TOPICS
        topic = rng.choice(list(topics))
        return {
            "name": rng.choice(OOD_NAMES if template.ood else NAMES),
            "topic": topic,
            "item": rng.choice(topics[topic]),
            "k": str(rng.randrange(2, 6)),
        }

    @classmethod
    def read(cls, template: Template, fields: dict[str, str], style: str) -> "Listing | None":
        """The task behind the fields of a prompt; None for an unknown topic or a count of nothing."""
        known = fields["topic"] in ALL_TOPICS and int(fields["k"]) > 0
        return cls(fields["topic"], int(fields["k"]), fields["item"], style) if known else None

    def assess(self, text: str) -> Assessment:
        """Distinct allowed items of the topic against the asked-for count and against everything that was named."""
        stated = [word for word in words_of(text) if word in ITEMS]
        good = set(stated) & set(ALL_TOPICS[self.topic]) - {self.excluded}
        return Assessment(
            relevance=len(good) / max(len(stated), 1),
            completeness=min(1.0, len(good) / self.count),
            correctness=float(len(good) == len(stated) == self.count),
            style=keeps_list_style(text, self.style),
        )

    def write(self, rng: random.Random, *, correct: bool, complete: bool, styled: bool) -> str:
        """An answer of the asked-for quality."""
        allowed = [item for item in ALL_TOPICS[self.topic] if item != self.excluded]
        items = rng.sample(allowed, min(self.count, len(allowed)))
        if not complete:
            items = items[: max(1, len(items) - 2)]
        elif not correct:
            items[rng.randrange(len(items))] = self.excluded
        style = self.style if styled else other_list_style(self.style)
        return rng.choice(("I suggest {0}.", "Good ones are {0}.", "Here they are: {0}.")).format(
            write_items(items, style)
        )


@dataclass(frozen=True)
class Lookup:
    """Reading a value from a small table in the prompt; the hard part is the binding of key and value."""

    name: ClassVar = "lookup"
    styles: ClassVar = ("quotes", "sentence")
    templates: ClassVar = (
        Template("Prices: {table}. What is the price of {key}?"),
        Template("In stock: {table}. How much {key} is there?"),
        Template("The points are {table}. How many points for {key}?", ood=True),
        Template("How old is {key}, if the ages are {table}?", ood=True),
    )
    table: tuple[tuple[str, str], ...]
    key: str
    style: str

    @classmethod
    def draw_fields(cls, rng: random.Random, template: Template) -> dict[str, str]:
        """Random contents of a template's fields."""
        size = rng.randrange(3, 6)
        keys = rng.sample(OOD_NAMES if template.ood else TOPICS[rng.choice(("fruits", "drinks", "tools"))], size)
        values = rng.sample(range(1, 100), size)
        return {
            "table": ", ".join(f"{key} {value}" for key, value in zip(keys, values, strict=True)),
            "key": rng.choice(keys),
        }

    @classmethod
    def read(cls, template: Template, fields: dict[str, str], style: str) -> "Lookup | None":
        """The task behind the fields of a prompt; None where the table has no such key or is no table."""
        rows = tuple((key, value) for key, _, value in (row.partition(" ") for row in fields["table"].split(", ")))
        proper = len(rows) > 1 and all(value.isdigit() for _, value in rows) and fields["key"] in dict(rows)
        return cls(rows, fields["key"], style) if proper else None

    def assess(self, text: str) -> Assessment:
        """One claimed number, equal to the asked-for value; relevance falls with each other key that is named."""
        claims = stated_numbers(text)
        named = {key.lower() for key, _ in self.table} & set(words_of(text))
        return Assessment(
            relevance=1.0 / len(named) if self.key.lower() in named else 0.0,
            completeness=float(bool(claims)),
            correctness=float(claims == {dict(self.table)[self.key]}),
            style=float((QUOTED.search(text) is not None) == (self.style == "quotes")),
        )

    def write(self, rng: random.Random, *, correct: bool, complete: bool, styled: bool) -> str:
        """An answer of the asked-for quality."""
        if not complete:
            return rng.choice(("The table says so for {0}.", "It is there, next to {0}.")).format(self.key)
        right = dict(self.table)[self.key]
        value = right if correct else rng.choice([other for _, other in self.table if other != right] or ["0"])
        number = f'"{value}"' if styled == (self.style == "quotes") else value
        return rng.choice(("The value for {0} is {1}.", "For {0} it is {1}.", "It says {1} for {0}.")).format(
            self.key, number
        )


Task = Arithmetic | Order | Listing | Lookup
TASK_TYPES: tuple[type[Arithmetic] | type[Order] | type[Listing] | type[Lookup], ...] = (
    Arithmetic,
    Order,
    Listing,
    Lookup,
)


_PATTERNS = [(task, template, template.pattern()) for task in TASK_TYPES for template in task.templates]


def draw_prompt(rng: random.Random, *, ood: bool) -> str:
    """A random prompt; out-of-distribution ones use wordings, names and topics that training never shows."""
    task = rng.choice(TASK_TYPES)
    template = rng.choice([template for template in task.templates if template.ood == ood])
    question = template.text.format(**task.draw_fields(rng, template))
    return f"{question} {STYLES[rng.choice(task.styles)]}"


@lru_cache(maxsize=4096)
def parse_prompt(prompt: str) -> Task | None:
    """The task that a prompt asks for, or None where the text is no prompt of the synthetic benchmark."""
    for style, sentence in STYLES.items():
        if not prompt.endswith(f" {sentence}"):
            continue
        question = prompt[: -len(sentence) - 1]
        for task, template, pattern in _PATTERNS:
            match = pattern.fullmatch(question) if style in task.styles else None
            if match is not None:
                return task.read(template, match.groupdict(), style)
    return None
