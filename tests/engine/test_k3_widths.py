"""A step at Kimi K3's real widths, two layers and 128 experts of it, made up. Needs a card and 25 GB of disk."""

import json
from pathlib import Path

import pytest
import torch

from engine.generate import open_model
from engine.presets import KIMI_K3, scale
from formats.convert import convert
from formats.synthetic import write_checkpoint
from tests.reference.ftw_weights import load_ftw
from tests.reference.model import logits as reference_logits
from tests.reference.models import made_up_ids, run_chunks
from tests.reference.numbers import relative_error
from tests.reference.same_experts import SameExperts


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")
def test_step_equals_the_reference(tmp_path: Path) -> None:
    config = scale(KIMI_K3, layers=2, kda_heads=96, num_experts=128)
    write_checkpoint(tmp_path / "source", config, seed=5, experts="nvfp4", attention="fp8")
    folder = tmp_path / "ftw"
    convert(tmp_path / "source", folder)
    weights = load_ftw(folder)
    ids = made_up_ids(12, config["text_config"]["vocab_size"])
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        experts = SameExperts(open_model(folder, torch.device("cuda"), dtype=dtype))
        got = run_chunks(experts.model, ids, 12)
        error = relative_error(
            got, reference_logits(json.loads((folder / "config.json").read_text()), weights, ids, experts)
        )
        print(f"{dtype}: relative error {error:.2e}")
        assert error <= tolerance
        assert torch.equal(got, run_chunks(experts.model, ids, 7, then=1)), "prefill and decode differ"
