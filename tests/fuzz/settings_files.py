"""Settings files with one mutation: refused with a sentence, or read as what they say, and the same if written again.

What they say is read by PyYAML alone; a number may be written as text that names it, as YAML 1.1 reads 1e-4.
"""

import json
import random
from pathlib import Path
from typing import Any

import yaml
from data_files import SilentDifference, refused

DEFAULT_COUNT = 250
JUNK = (
    *(None, True, False, 0, -1, 1, 3, 0.5, -0.0, 1e308, float("nan"), float("inf"), 10**30, [], [1], ["a"], [[]], {}),
    *("", " ", "auto", "null", "1e-4", "-1", "0x10", "yes", "\u2028", "a" * 5000, "~", "../../x", {"preset": "smoke"}),
)
PARTS = (*"\t\n :'\x00{%0", "- ", "&a ", "*a", "<<: ", "!!int ", "!!python/name:os.system ")


def one(draw: random.Random, place: Path) -> str:
    """Write one file and read it; "same" or "refused"."""
    from pydantic import ValidationError

    from experiments.presets import PRESETS
    from flows.settings import load_config
    from rmcore.cli.guard import describe_validation
    from rmcore.core.errors import ConfigError

    preset = draw.choice(sorted(PRESETS))
    tree = PRESETS[preset].model_dump(mode="json") | draw.choice(({}, {"preset": preset}))
    text, file = _mutated(tree, draw), place / "settings.yaml"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    try:
        config = load_config(None if "preset" in tree else preset, file, [])
    except ConfigError as error:
        return refused(str(error))
    except ValidationError as error:
        return refused(describe_validation(error))
    written = config.model_dump(mode="json")
    file.with_name("again.yaml").write_text(yaml.safe_dump(written, allow_unicode=True), encoding="utf-8")
    if (again := load_config(preset, file.with_name("again.yaml"), [])) != config:
        raise SilentDifference(f"written again, it is {_differences(again.model_dump(mode='json'), written)}")
    if said := _differences(yaml.safe_load(text), written):
        raise SilentDifference(f"the file says otherwise than was read: {said}")
    return "same"


def _mutated(tree: dict, draw: random.Random) -> str:
    if draw.random() < 0.6:
        group, name = draw.choice([(group, name) for group in _groups(tree) for name in group])
        change = draw.choice(("value", "value", "value", "rename", "delete", "add"))
        if change == "value":
            group[name] = draw.choice(JUNK)
        elif change == "rename":
            group[draw.choice((name + "s", name.upper(), "", 7, None))] = group.pop(name)
        elif change == "delete":
            del group[name]
        else:
            group["added"] = draw.choice(JUNK)
        return yaml.safe_dump(tree, allow_unicode=draw.random() < 0.5, sort_keys=draw.random() < 0.5)
    text = yaml.safe_dump(tree)
    spot = draw.randrange(len(text))
    part, line = draw.choice(PARTS), text.find("\n", spot) + 1
    rest = draw.choice((part + text[spot:], text[spot + 1 :], "", text[line:]))
    return text[:spot] + rest


def _groups(tree: Any) -> list[dict]:
    inner = [group for value in tree.values() for group in _groups(value)] if isinstance(tree, dict) else []
    return [tree, *inner] if isinstance(tree, dict) and tree else inner


def _differences(said: Any, read: Any, where: str = "") -> str:
    """What a file says and the settings do not, in words; "" where there is nothing."""
    if isinstance(said, dict) and isinstance(read, dict):
        names = [name for name in said if name != "preset"]
        return "; ".join(filter(None, (_differences(said[name], read.get(name), f"{where}.{name}") for name in names)))
    if isinstance(said, list) and isinstance(read, list) and len(said) == len(read):
        return "; ".join(filter(None, (_differences(a, b, where) for a, b in zip(said, read, strict=True))))
    if said == read and (isinstance(read, bool) or not isinstance(said, bool)):
        return ""
    if isinstance(said, str) and isinstance(read, bool):  # as pydantic reads the words of YAML 1.1 in quotes
        said = said.lower() in ("1", "true", "t", "yes", "y", "on")
        return "" if said == read else f"{where[1:]} is {read} where it says the opposite"
    if isinstance(said, str | int) and isinstance(read, int | float) and not isinstance(said, bool):
        try:
            return "" if float(said) == read else f"{where[1:]} is {read!r} where it says {said!r}"
        except ValueError:
            pass
    return f"{where[1:]} is {json.dumps(read)[:80]} where it says {said!r:.80}"
