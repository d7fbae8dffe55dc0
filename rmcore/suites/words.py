"""A bag-of-words reward model: how far the words of an answer alone get, learnt from the training pairs.

Logistic regression on the difference of the two sides' TF-IDF vectors. It knows no order of words and no prompt, so
what a reward model does not do better on is decided by which words are used.
"""

from collections.abc import Sequence
from itertools import islice

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.data.tokenized import Pairs
from rmcore.suites.question import Question

MOST_PAIRS = 100_000
"""The first pairs that are learnt from: more words would be rarer than counts."""
MOST_WORDS = 50_000


def word_rewards(pairs: Pairs, questions: Sequence[Question]) -> list[FloatArray] | None:
    """Rewards of each question's answers by a bag of words that learnt from `pairs`; None where no word is in two.

    Words in one answer alone are left out, the rest weigh by 1 + log(count) times their rarity, normalised to length
    1; the penalty is scikit-learn's default (C = 1).
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    first = list(islice(pairs, MOST_PAIRS))
    vectorizer = TfidfVectorizer(sublinear_tf=True, min_df=2, max_features=MOST_WORDS)
    try:
        vectorizer.fit(text for pair in first for text in (pair.chosen, pair.rejected))
    except ValueError:  # an empty vocabulary
        return None
    chosen, rejected = (
        vectorizer.transform([getattr(pair, side) for pair in first]) for side in ("chosen", "rejected")
    )
    # Half of the pairs the other way round: a regression needs both outcomes.
    sign = np.where(np.arange(len(first)) % 2, -1.0, 1.0)
    model = LogisticRegression(fit_intercept=False, max_iter=1000)
    model.fit((chosen - rejected).multiply(sign[:, None]).tocsr(), sign > 0)
    rewards = vectorizer.transform([text for one in questions for text in one.answers]) @ model.coef_[0]
    return np.split(rewards, np.cumsum([len(one.answers) for one in questions])[:-1])
