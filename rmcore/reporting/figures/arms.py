"""How the arms of an experiment are shown: colour and marker, the same everywhere, and which metrics go with them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.style import key_line, shared_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 9
"""Arms that colours and markers tell apart; where there are more, figures with labels show this many."""
CONTROL_COLOUR = "#4a4f55"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933")
"""Okabe and Ito's, then two of Tol's muted ones (personal.sron.nl/~pault)."""
_MARKERS = ("o", "s", "^", "v", "P", "X", "<", ">")
_MOST_METRICS = 6
_LONGEST = 26  # characters of a name in a figure


class ArmStyle(NamedTuple):
    """Colour and marker of an arm; the control is a grey diamond."""

    colour: str
    marker: str


def looks(arms: Sequence[Mapping[str, Any]], metric: str, better: bool | None) -> dict[str, ArmStyle]:
    """The look of each arm by name; those of `shown` are told apart, further ones repeat colours with other markers.

    Args:
        arms: {name, is_control, metrics} each.
        metric: as in `shown`.
        better: as in `shown`.
    """
    named = shown(arms, metric, better)
    others = [arm["name"] for arm in arms if not arm["is_control"]]
    found = {arm["name"]: ArmStyle(CONTROL_COLOUR, "D") for arm in arms}
    for position, name in enumerate(sorted(others, key=lambda name: name not in named)):  # stable: declared order
        turn, place = divmod(position, len(COLOURS))
        found[name] = ArmStyle(COLOURS[place], _MARKERS[(place + 3 * turn) % len(_MARKERS)])
    return found


def name_arms(figure: "Figure", look: Mapping[str, ArmStyle]) -> None:
    """Name the arms in a legend below all panels."""
    handles = [key_line(short(name), color=one.colour, marker=one.marker) for name, one in look.items()]
    shared_legend(figure, min(5, len(handles)), side="left", handles=handles)


def declared_colours(arms: Sequence[str], control: str) -> dict[str, str]:
    """The colour of each arm by name before anything is measured: what `looks` gives unless there are many."""
    others = [name for name in arms if name != control]
    return {control: CONTROL_COLOUR} | {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(others)}


def short(name: str, longest: int = _LONGEST) -> str:
    """The name, its middle left out where it is long: names of one family often differ at the ends."""
    return name if len(name) <= longest else f"{name[: longest // 2]}…{name[-(longest - longest // 2 - 1) :]}"


def shown(arms: Sequence[Mapping[str, Any]], metric: str, better: bool | None) -> list[str]:
    """Names of the arms that a figure labels, in declared order: the control and the best means of `metric`.

    Args:
        arms: {name, is_control, metrics} each.
        metric: by which the best are chosen where there are more than MOST.
        better: whether higher is better; None counts as higher.
    """

    def rank(arm: Mapping[str, Any]) -> tuple[bool, float]:
        value = numbers.finite(arm["metrics"].get(metric, {}).get("value"))
        worst = value is None
        return not arm["is_control"], float("inf") if worst else (value or 0.0) * (1 if better is False else -1)

    kept = {arm["name"] for arm in sorted(arms, key=rank)[:MOST]}
    return [arm["name"] for arm in arms if arm["name"] in kept]


def main_metrics(metrics: Sequence[str], hypotheses: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics shown side by side, in declared order: the first, those of hypotheses, then others up to six."""
    asked = {item["metric"] for item in hypotheses}
    chosen = [name for position, name in enumerate(metrics) if position == 0 or name in asked]
    rest = [name for name in metrics if name not in chosen]
    chosen += rest[: max(0, _MOST_METRICS - len(chosen))]
    return [name for name in metrics if name in chosen]
