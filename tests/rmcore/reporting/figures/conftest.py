"""Figures drawn strictly."""

import io
import warnings

import pytest


@pytest.fixture(scope="session")
def draw():
    """Renders small with warnings as errors: a missing glyph, a log of zero or a failed layout is a defect."""

    def drawn(figure):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figure.savefig(io.BytesIO(), format="png", dpi=40)
        return figure

    return drawn
