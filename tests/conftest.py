"""Where kernels run: a card when there is one, else Triton's interpreter, decided before triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Run the test in the interpreter, or on the card where there is one."""
    has_card = torch.cuda.is_available()
    if (request.param == "cuda") != has_card:
        pytest.skip("needs an NVIDIA card" if request.param == "cuda" else "kernels are compiled here, not interpreted")
    return torch.device(request.param)
