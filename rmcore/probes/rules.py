"""All rules by name: the built-in ones and the user's own."""

from collections.abc import Sequence

from rmcore.core.errors import ConfigError
from rmcore.probes import faults, manner
from rmcore.probes.rule import Rule, load_rule

RULES = {one.name: one for room in (manner, faults) for one in vars(room).values() if isinstance(one, Rule)}
"""Built-in rules, those about manner first."""


def find_rules(names: Sequence[str]) -> list[Rule]:
    """Give the rules of these names, `module:function` for one's own; all built-in ones where none is named.

    Raises:
        ConfigError: there is no such rule, or one is named twice.
    """
    if not names:
        return list(RULES.values())
    if len(set(names)) < len(names):
        raise ConfigError("a rule is named twice in --rule; name each once.")
    unknown = [name for name in names if ":" not in name and name not in RULES]
    if unknown:
        raise ConfigError(
            f"there is no rule {unknown[0]!r}; name one of {', '.join(RULES)}, or module:function for one of your own."
        )
    return [load_rule(name) if ":" in name else RULES[name] for name in names]
