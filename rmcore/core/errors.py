"""The errors this platform raises on purpose.

Each is also a built-in `ValueError` or `RuntimeError`, so library users need not import this module to catch them.
A message says what was seen, what it means and what to do; the command line prints it alone, without a traceback.
"""

INTERRUPTED = 130
"""Exit status of a program, and of a stage's process, that was asked to end."""


class RmcoreError(Exception):
    """Base of every deliberate error of the platform."""


class ConfigError(RmcoreError, ValueError):
    """A configuration key or value cannot be used."""


class DataError(RmcoreError, ValueError):
    """Preference data is missing, unreadable or unusable."""


class ModelError(RmcoreError, ValueError):
    """A model or tokenizer cannot serve as a reward model."""


class TrainingError(RmcoreError, RuntimeError):
    """Training had to stop, for example because the loss is not finite."""


class LostProcessError(TrainingError):
    """Another process of the same training has ended, or cannot be reached: the reason is with that one."""


class CurvatureError(RmcoreError, RuntimeError):
    """A curvature quantity could not be computed."""


class StoreError(RmcoreError, RuntimeError):
    """The artifact store holds something damaged or could not be written."""


class ServiceError(RmcoreError, RuntimeError):
    """A service (Prefect, MLflow) did not start or did not answer."""


class ServingError(RmcoreError, RuntimeError):
    """A reward server did not start, is away, or failed while it answered."""


class NotReadyError(ServingError):
    """A reward server cannot answer now: it starts, restarts or has too much to do. The same request may work later."""


class JudgementsWantedError(RmcoreError):
    """Pairs wait for people: nothing failed, and the same command resumes when they have answered."""


class RequestError(RmcoreError, ValueError):
    """A reward server refused a request or an update of its weights, which will not work in this form.

    `field` names the part of a request that it is about, such as `inputs.3`; None where it is about all of it.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
