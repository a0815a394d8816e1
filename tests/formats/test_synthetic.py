"""Made-up checkpoints: same seed, same bytes; values of the magnitudes that they promise; little memory."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.presets import KIMI_K3, scale
from formats import synthetic
from formats.checkpoint import Checkpoint, open_checkpoint
from formats.dtypes import bf16_to_f32
from formats.errors import FormatError
from formats.quantize import block_fp8_dequantize, mxfp4_dequantize, nvfp4_dequantize
from formats.safetensors import read
from formats.synthetic import write_checkpoint

SMALL = scale(
    KIMI_K3,
    layers=4,
    kda_heads=4,
    kda_head_dim=32,
    vocab_size=512,
    hidden_size=256,
    intermediate_size=192,
    num_attention_heads=2,
    q_lora_rank=128,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=64,
    routed_expert_hidden_size=96,
    attn_res_block_size=2,
)
EXPERTS = "model.layers.1.block_sparse_moe.experts"


def make(path: Path, config: dict[str, Any] = SMALL, **options: Any) -> Checkpoint:
    write_checkpoint(path, config, **({"seed": 5, "experts": "nvfp4", "attention": "fp8"} | options))
    return open_checkpoint(path)


def values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """float32 values of a tensor, whatever its format."""
    tensor = checkpoint.tensors[name]
    if tensor.dtype == "float8_e4m3fn":
        return block_fp8_dequantize(read(tensor), read(checkpoint.tensors[f"{name}_scale"]))
    return bf16_to_f32(read(tensor)) if tensor.dtype == "bfloat16" else read(tensor)


def expert(checkpoint: Checkpoint, number: int, part: str) -> np.ndarray:
    """float32 weights of one matrix of an expert."""
    at = f"{EXPERTS}.{number}.{part}"
    if checkpoint.expert_format == "bf16":
        return values(checkpoint, f"{at}.weight")
    names = (
        ["weight", "weight_scale", "weight_scale_2"]
        if checkpoint.expert_format == "nvfp4"
        else ["weight_packed", "weight_scale"]
    )
    stored = [read(checkpoint.tensors[f"{at}.{name}"]) for name in names]
    return nvfp4_dequantize(*stored) if len(stored) == 3 else mxfp4_dequantize(*stored)


def test_same_seed_same_files_other_seed_other_values(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        make(tmp_path / name, seed=seed, shards=2)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [
        "config.json",
        "hf_quant_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (tmp_path / "a" / files[2]).read_bytes() != (tmp_path / "c" / files[2]).read_bytes()


def test_neither_shards_nor_pieces_change_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(tmp_path / "a")
    monkeypatch.setattr(synthetic, "PIECE_VALUES", 128 * 256)
    pieces = make(tmp_path / "b", shards=7)
    assert len({tensor.file for tensor in pieces.tensors.values()}) == 7
    for name, tensor in whole.tensors.items():
        assert np.array_equal(read(tensor), read(pieces.tensors[name])), name


@pytest.mark.parametrize("shards", [2, 3, 10**6])
def test_a_weight_and_its_scales_share_a_file(tmp_path: Path, shards: int) -> None:
    checkpoint = make(tmp_path / "a", shards=shards)
    for name, tensor in checkpoint.tensors.items():
        owner = name.split("_scale")[0] if "weight_scale" in name else name
        assert checkpoint.tensors[owner].file == tensor.file
    sizes = [path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors")]
    assert shards == 10**6 or (len(sizes) == shards and max(sizes) < 2 * min(sizes))


def test_trunk_has_the_promised_magnitudes(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "a")
    for name, deviation in (
        ("model.embed_tokens.weight", 1),
        ("lm_head.weight", 2 / 16),
        ("model.layers.0.self_attn.q_proj.weight", 1 / 16),
        ("model.layers.0.self_attn.f_b_proj.weight", 32**-0.5),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", 1 / 16),
        ("model.layers.0.self_attn.q_conv1d.weight", 0.5),
        ("model.layers.0.mlp_res_proj.weight", 1 / 16),
    ):
        assert values(checkpoint, name).std() == pytest.approx(deviation, rel=0.15), name
    gains = values(checkpoint, "model.norm.weight")
    assert 0.9 < gains.mean() < 1.1 and 0.05 < gains.std() < 0.15
    assert np.unique(values(checkpoint, "model.layers.1.block_sparse_moe.gate.e_score_correction_bias")).size == 4


def test_decay_gates_are_real_ones(tmp_path: Path) -> None:
    bounded = make(tmp_path / "a")
    a_log = values(bounded, "model.layers.0.self_attn.A_log")
    assert a_log.shape == (128,) and (a_log[4:] == 0).all()
    assert ((a_log[:4] > 0) & (a_log[:4] < np.log(16))).all()
    bias = values(bounded, "model.layers.0.self_attn.dt_bias")
    assert -6 <= bias.min() < -4 and 0 < bias.max() <= 2
    linear = SMALL["text_config"]["linear_attn_config"] | {"gate_lower_bound": None}
    config = SMALL["text_config"] | {"linear_attn_config": linear}
    unbounded = make(tmp_path / "b", config, experts="bf16", attention="bf16")
    assert values(unbounded, "model.layers.0.self_attn.A_log").shape == (1, 1, 4, 1)
    step = np.log1p(np.exp(values(unbounded, "model.layers.0.self_attn.dt_bias")))
    assert 0.9e-3 < step.min() < 3e-3 and 0.05 < step.max() < 0.101


@pytest.mark.parametrize("experts", ["nvfp4", "mxfp4", "bf16"])
@pytest.mark.parametrize("ratio", [4.0, 1.0])
def test_gate_is_wider_than_up_by_the_ratio(tmp_path: Path, experts: str, ratio: float) -> None:
    checkpoint = make(tmp_path / "a", experts=experts, gate_up_ratio=ratio)
    # A power of two is the finest that MXFP4 can follow.
    slack = 2**0.5 * 1.1 if experts == "mxfp4" else 1.1
    deviations = []
    for number in range(4):
        gate, up, down = (float(expert(checkpoint, number, part).std()) for part in ("w1", "w3", "w2"))
        assert ratio / slack**2 < gate / up < ratio * slack**2
        assert 0.4 < (gate * up) ** 0.5 * 96**0.5 < 2.3 and 0.4 < down * 64**0.5 < 2.3
        deviations.append(gate)
    assert max(deviations) > 1.1 * min(deviations)


def test_nvfp4_has_every_code_many_scales_and_globals_that_float16_holds(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "a")
    names = [f"{EXPERTS}.{number}.{part}" for number in range(4) for part in ("w1", "w2", "w3")]
    packed = np.concatenate([read(checkpoint.tensors[f"{name}.weight"]).reshape(-1) for name in names])
    assert np.unique(packed).size == 256
    scales = np.concatenate([read(checkpoint.tensors[f"{name}.weight_scale"]).reshape(-1) for name in names])
    assert np.unique(scales).tolist() == list(range(0x68, 0x7F))
    whole = np.array([read(checkpoint.tensors[f"{name}.weight_scale_2"]) for name in names])
    assert np.unique(whole).size == len(names) and (whole.astype(np.float16).astype(np.float32) == whole).all()


def test_configs_say_how_the_folder_was_quantised(tmp_path: Path) -> None:
    nvfp4 = make(tmp_path / "a").config
    layers = nvfp4["quantization_config"]["quantized_layers"]
    assert layers[f"language_model.{EXPERTS}"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert layers["language_model.model.layers.0.self_attn.q_proj"] == {"quant_algo": "FP8_PB_WO"}
    assert len(layers) == 3 + 3 * 8 + 6
    assert {key: value for key, value in nvfp4.items() if key != "quantization_config"} == SMALL
    beside = json.loads((tmp_path / "a" / "hf_quant_config.json").read_text())
    assert beside["quantization"]["quantized_layers"] == layers
    mxfp4 = make(tmp_path / "b", experts="mxfp4", attention="bf16").config
    assert mxfp4["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert "quantization_config" not in mxfp4
    assert make(tmp_path / "c", experts="bf16", attention="bf16").config == SMALL


def test_memory_holds_pieces_not_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "PIECE_VALUES", 1 << 16)
    config = SMALL | {"text_config": SMALL["text_config"] | {"vocab_size": 32768}}
    tracemalloc.start()
    try:
        make(tmp_path / "a", config)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The embedding alone has 16 MiB as stored and 32 as drawn.
    assert peak < 6 << 20


def test_a_folder_with_weights_is_left_alone(tmp_path: Path) -> None:
    make(tmp_path / "a")
    with pytest.raises(FormatError, match="holds safetensors already"):
        make(tmp_path / "a")


def test_unknown_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="experts is 'int4'"):
        make(tmp_path / "a", experts="int4")
