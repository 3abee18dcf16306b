"""Errors that a user can cause or cure. Each message names the value and the remedy, in one line."""


class OctavoError(Exception):
    """Base of every error that Octavo raises on purpose."""


class ConfigError(OctavoError, ValueError):
    """A setting, or a combination of settings, that cannot be served: raised at start."""


class ModelError(OctavoError):
    """A model that cannot be found, read or run (missing, truncated, corrupt, unknown architecture)."""


class RequestError(OctavoError, ValueError):
    """A request that cannot be served as asked (HTTP 400). Other requests are unaffected.

    `param` names the offending field where there is one, `code` is OpenAI's word for what is wrong where
    programs go by it.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""Code of requests that are longer than the model's context: agents shorten their history by it."""


class EngineDeadError(OctavoError):
    """The engine core has stopped; requests in flight cannot be finished."""


class EngineAsleepError(OctavoError):
    """The engine sleeps; it takes requests again once it is woken up."""


class EngineRestartingError(EngineDeadError):
    """The engine core has stopped and is being started again; what it was computing is lost."""


class RequestFailedError(OctavoError):
    """A request was accepted but could not be finished (a step failed); others are unaffected."""


class RequestAbortedError(RequestFailedError):
    """A request was ended by whoever runs the engine before it was finished; nothing is wrong with it."""


def first_line(error: BaseException) -> str:
    """What another library's error says, as a part of one of ours: its first line, or its kind if it says
    nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
