"""Observations of every kind, about made-up answers."""

import random

import pytest

from rmcore.data.observation import Observation

WORDS = ["river", "stone", "lamp", "farm", "copper", "window", "forest", "port", "silver", "meadow", "bridge", "candle"]


def answers(generator: random.Random, number: int) -> tuple[str, ...]:
    return tuple(f"{' '.join(generator.choices(WORDS, k=generator.randint(3, 9)))} {at}." for at in range(number))


def make_observations(number: int, *, kinds: tuple[str, ...], seed: int = 0) -> list[Observation]:
    """Observations of these kinds in turn, judged at random."""
    generator = random.Random(seed)  # noqa: S311 - data
    made = []
    for at in range(number):
        kind = kinds[at % len(kinds)]
        prompt = f"Tell me about {generator.choice(WORDS)} number {at}."
        common = {"weight": 1.0 + (at % 3) / 2}
        if kind == "pair":
            made.append(Observation(prompt, answers(generator, 2), ranks=(1, 2), **common))
        elif kind == "tie":
            made.append(Observation(prompt, answers(generator, 2), ranks=(1, 1), **common))
        elif kind == "ranking":
            ranks = [1, 2, 2, 3]
            generator.shuffle(ranks)
            made.append(Observation(prompt, answers(generator, 4), ranks=tuple(ranks), **common))
        elif kind == "best":
            best = generator.randrange(3)
            ranks = tuple(1 if place == best else 2 for place in range(3))
            made.append(Observation(prompt, answers(generator, 3), ranks=ranks, top_only=True, **common))
        elif kind == "grade":
            grades = (float(generator.randrange(4)), float(generator.randrange(4)))
            made.append(Observation(prompt, answers(generator, 2), grades={"overall": grades}, **common))
        else:
            grades = {
                "helpfulness": (float(generator.randrange(5)), float(generator.randrange(5))),
                "safe": (float(generator.randrange(2)), None),
                "length": (generator.gauss(0, 1), generator.gauss(0, 1)),
            }
            made.append(Observation(prompt, answers(generator, 2), grades=grades, **common))
    return made


ALL = ("pair", "tie", "ranking", "best", "attributes")


@pytest.fixture(scope="session")
def observations_of():
    return make_observations
