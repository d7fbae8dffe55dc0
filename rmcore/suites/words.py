"""A bag-of-words reward model: how far the words of an answer alone get, learnt from the training pairs.

Logistic regression on the difference of the two sides' TF-IDF vectors. It knows no order of words and no prompt, so
what a reward model does not do better on is decided by which words are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from scipy import sparse

from rmcore.core.arrays import FloatArray
from rmcore.core.extras import require_extra
from rmcore.data.tokenized import Pairs
from rmcore.suites.question import Question

MOST_PAIRS = 100_000
"""The first pairs that are learnt from: more words would be rarer than counts."""
MOST_WORDS = 50_000


@dataclass(frozen=True, slots=True)
class WordModel:
    """A bag of words that has learnt."""

    vectorizer: Any
    weights: FloatArray
    """(W,) of the words."""

    def rewards(self, questions: Sequence[Question]) -> list[FloatArray]:
        """Rewards of each question's answers."""
        rewards = self.vectorizer.transform([text for one in questions for text in one.answers]) @ self.weights
        return np.split(rewards, np.cumsum([len(one.answers) for one in questions])[:-1])


def learn_words(pairs: Pairs) -> WordModel | None:
    """Fit a bag of words to training pairs; None where no word occurs in two answers.

    Words in one answer alone are left out, the rest weigh by 1 + log(count) times their rarity, normalised to length
    1; the penalty is scikit-learn's default (C = 1).
    """
    require_extra("sklearn", "benchmark", "the bag-of-words model next to a benchmark's score")
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    first = list(islice(pairs, MOST_PAIRS))
    vectorizer = TfidfVectorizer(sublinear_tf=True, min_df=2, max_features=MOST_WORDS)
    try:
        vectorizer.fit(text for pair in first for text in (pair.chosen, pair.rejected))
    except ValueError:  # an empty vocabulary
        return None
    chosen = vectorizer.transform([pair.chosen for pair in first])
    rejected = vectorizer.transform([pair.rejected for pair in first])
    # Each pair both ways round: a regression needs both outcomes, and none of them more often.
    both = sparse.vstack([chosen - rejected, rejected - chosen]).tocsr()
    model = LogisticRegression(fit_intercept=False, max_iter=1000, C=0.5)  # two rows a pair: half for each is C = 1
    model.fit(both, np.repeat([True, False], len(first)))
    return WordModel(vectorizer, np.asarray(model.coef_[0], dtype=np.float64))
