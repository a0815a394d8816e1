"""Small converted models, made once for all tests of the engine."""

from pathlib import Path

import pytest

from tests.reference.models import KINDS, make_model


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FTW folder of one small model; its source lies beside it."""
    return make_model(kind, tmp_path_factory.mktemp(kind))
