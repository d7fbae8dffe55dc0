"""What all settings have in common."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of all settings: immutable, no unknown keys, field help from the docstring under each field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
