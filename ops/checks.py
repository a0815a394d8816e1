"""Checks that launchers make before a kernel runs, and the one error they raise."""

from torch import Tensor


class ShapeError(ValueError):
    """A tensor's shape, stride, dtype or device is not what a launcher wants."""


def describe(x: Tensor) -> str:
    """Say what a tensor is: ``torch.float32[5, 3] stride [3, 1] on cpu``."""
    return f"{x.dtype}{list(x.shape)} stride {list(x.stride())} on {x.device}"


def expect(condition: bool, message: str) -> None:
    """Raise :class:`ShapeError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ShapeError(message)
