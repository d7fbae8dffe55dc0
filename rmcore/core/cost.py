"""The cost of computing: seconds of a device, and money where the price of its hour is set."""

import math
import os

from rmcore.core.errors import ConfigError

PRICE_VARIABLE = "RM_OPT_PRICE_PER_HOUR"


def price_per_hour() -> float | None:
    """Price of one device's hour, in whatever currency it was set; None where `RM_OPT_PRICE_PER_HOUR` is not set.

    Raises:
        ConfigError: it is no number above 0.
    """
    named = os.environ.get(PRICE_VARIABLE)
    if named is None:
        return None
    try:
        price = float(named)
    except ValueError:
        price = math.nan
    if not 0 < price < math.inf:
        raise ConfigError(
            f"{PRICE_VARIABLE}={named!r} is no price of a device's hour; set it to 2.5, say, or unset it."
        )
    return price


def money(device_seconds: float | None, price: float | None) -> float | None:
    """Cost of so many seconds at a price an hour; None where either is unknown.

    >>> money(1800, 2.5)
    1.25
    """
    return None if device_seconds is None or price is None else device_seconds / 3600 * price


def money_text(device_seconds: float | None, price: float | None) -> str:
    """The same for people, empty where it is unknown.

    >>> money_text(1800, 2.5), money_text(1800, None)
    ('1.25 at 2.5 an hour', '')
    """
    cost = money(device_seconds, price)
    return "" if cost is None else f"{cost:.2f} at {price:g} an hour"
