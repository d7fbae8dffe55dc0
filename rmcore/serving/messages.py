"""Messages about a bad request or token, in the same words on both sides of the wire."""

import re

from pydantic import ValidationError

from rmcore.core.errors import ConfigError

_FORMS = "it is none of a text, messages, token ids, or a prompt with a response"


def first_error(error: ValidationError) -> tuple[str, str]:
    """The first field that is wrong, such as inputs.3.response (`body` for the whole), and why."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    same_input = [detail for detail in details if detail["loc"][:2] == details[0]["loc"][:2]]
    deepest = max(same_input, key=lambda detail: len(detail["loc"]))  # of all forms, the one that was meant
    place = deepest["loc"]
    if place[:1] == ("inputs",):
        place = place[:2] + place[3:]  # the third is the form's name and no field
    names = [str(part) for part in place if part not in ("str", "ChatMessage") and not str(part).startswith("tuple[")]
    return ".".join(names) or "body", _FORMS if deepest["type"] == "union_tag_not_found" else deepest["msg"]


def checked_token(token: str) -> str:
    """The token, which is never shown.

    Raises:
        ConfigError: no HTTP header can carry it.
    """
    if not re.fullmatch(r"[!-~]+", token):
        raise ConfigError(
            "the token is empty or holds a space, a line end or a letter that is not ASCII, which no HTTP header can "
            "carry; read it again (a file often ends in a line end), or leave it out for a server without one."
        )
    return token
