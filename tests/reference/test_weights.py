"""The two loaders of weights agree on a checkpoint and its conversion."""

import json
from pathlib import Path

import pytest
import torch

from tests.reference.ftw_weights import load_ftw
from tests.reference.model import logits
from tests.reference.models import KINDS, made_up_ids, make_model
from tests.reference.numbers import relative_error
from tests.reference.source_weights import load_source


@pytest.mark.parametrize("kind", KINDS)
def test_source_and_conversion_agree(kind: str, tmp_path: Path) -> None:
    folder = make_model(kind, tmp_path)
    source, converted = load_source(tmp_path / "source"), load_ftw(folder)
    assert source.keys() == converted.keys()
    # FP8 weights that the folder does not keep in FP8 are rounded to bf16.
    rounded = [name for name, w in source.items() if not torch.equal(w.flatten(), converted[name].flatten())]
    for name in rounded:
        assert name.endswith("_proj.weight") or name.endswith("kv_a_proj_with_mqa.weight"), name
        assert torch.equal(source[name].bfloat16().double(), converted[name]), name
    assert bool(rounded) == (kind == "k3")
    config = json.loads((folder / "config.json").read_text())
    ids = made_up_ids(9, config.get("text_config", config)["vocab_size"])
    want = logits(config, source, ids)
    assert 0.5 < want.std() < 5 and relative_error(logits(config, converted, ids), want) < 5e-3
