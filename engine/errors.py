"""Errors of the engine. ``cli.main`` turns each into one line on stderr."""


class EngineError(RuntimeError):
    """The engine cannot do what was asked."""


class CapacityError(EngineError):
    """Memory, slots or positions do not suffice; the message has the numbers."""


class RequestError(EngineError):
    """A request is malformed; the message names the field and what was wanted."""
