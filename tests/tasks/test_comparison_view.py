"""Runs of a study have names that tell them apart and that MLflow stores, whatever their settings are."""

from hypothesis import given
from hypothesis import strategies as st

from rmcore.reporting.runs import KEY_DIGITS
from tasks.comparison_view import told_apart

COLUMN = 250
"""Characters of MLflow's column of names, which PostgreSQL holds it to."""
PARAMS = st.dictionaries(
    st.sampled_from(["policy.judge", "train.lr", "model.name"]), st.text(min_size=100, max_size=400), min_size=3
)


@given(st.lists(PARAMS, min_size=2, max_size=3))
def test_a_name_with_the_digits_of_its_key_fits_the_column(params):
    assert all(len(f"{name} · {'0' * KEY_DIGITS}") <= COLUMN for name in told_apart(params))


def test_values_that_end_alike_are_told_whole():
    judges = [f"openai:{model}@http://127.0.0.1:8000/v1" for model in ("small", "large")]
    assert told_apart([{"policy.judge": judge} for judge in judges]) == [f"judge={judge}" for judge in judges]
    assert told_apart([{"data.source": f"/a/{name}.csv"} for name in "xy"]) == ["data=x.csv", "data=y.csv"]
