"""Pictures as users see them."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _drawn(true_pictures):
    pass
