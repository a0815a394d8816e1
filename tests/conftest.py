"""Where kernels run: a card when there is one, else Triton's interpreter, decided before triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

HERE = pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=[HERE])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The card, where there is one, else the interpreter."""
    return torch.device(request.param)
