"""A scorer of tokenized sides whose reward is a function of the answer's text, read back from the tokens."""

from collections.abc import Callable, Sequence

import numpy as np

from rmcore.core.progress import Report, silent
from rmcore.data.rendering import Renderer, Rendering, TokenizedSide
from rmcore.models.tiny import tiny_tokenizer


class TextScorer:
    def __init__(self, worth: Callable[[str], float], max_seq_len: int = 256) -> None:
        self.worth = worth
        self.renderer = Renderer(tiny_tokenizer(), Rendering("plain", max_seq_len))
        self.num_calls = 0

    def score_sides(self, sides: Sequence[TokenizedSide], *, report: Report = silent) -> np.ndarray:
        self.num_calls += 1
        texts = [self.renderer.tokenizer.decode(side.ids, skip_special_tokens=True) for side in sides]
        return np.array([self.worth(text.partition("Response: ")[2].strip()) for text in texts], dtype=np.float32)
