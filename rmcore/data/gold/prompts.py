"""Prompts of the synthetic benchmark: drawing one, and reading the task back from its text.

A prompt is a single user turn: a filled template and a style sentence. `parse_prompt` inverts exactly that, so that a
response can be judged from the two texts alone, wherever they come from.
"""

import random
from functools import lru_cache

from rmcore.data.gold.grammar import STYLES
from rmcore.data.gold.tasks import TASK_TYPES, Task

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
