"""The incremental selection against one that looks at all evaluations again each time."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rmcore.training.record import HIGHER_IS_BETTER, Selection

# Few different values, so that ties occur.
values = st.lists(
    st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.just(math.nan), st.just(math.inf)), max_size=12
)
settings = st.tuples(st.sampled_from(sorted(HIGHER_IS_BETTER)), st.integers(1, 4))


def ranking(noted, higher):
    """Defined evaluations, best first, of equals the earlier."""
    defined = [(value, step) for step, value in noted if math.isfinite(value)]
    return sorted(defined, key=lambda entry: (-entry[0] if higher else entry[0], entry[1]))


def without_improvement(noted, higher):
    """Evaluations since the last one that was better than all before."""
    reference, since = None, 0
    for _, value in noted:
        better = math.isfinite(value) and (reference is None or (value > reference if higher else value < reference))
        reference, since = (value, 0) if better else (reference, since + 1)
    return since


@given(values, settings)
def test_it_agrees_with_looking_at_everything_again(sequence, setting):
    metric, keep = setting
    selection, noted, there = Selection(metric, keep), [], set()
    for number, value in enumerate(sequence):
        step = 10 * (number + 1)
        noted.append((step, value))
        kept, dropped = selection.note(value, step)
        expected = ranking(noted, HIGHER_IS_BETTER[metric])
        assert selection.kept == expected[:keep]
        assert selection.best == (expected[0] if expected else None)
        assert selection.evaluations_since == without_improvement(noted, HIGHER_IS_BETTER[metric])
        # Who does as told has exactly the kept ones.
        there = (there | ({step} if kept else set())) - set(dropped)
        assert there == {one for _, one in selection.kept}
        assert kept == (step in there)
