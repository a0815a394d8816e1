"""Made-up checkpoints with the layouts and names of real ones, for tests, examples and trials of speed.

Every value follows from (seed, tensor name) alone. Weights keep activations near 1 and let logits span a few units;
decay gates have the magnitudes of trained models. Expert codes and scales are drawn directly, so that every code
occurs, and the globals of an expert's gate and up halves differ.

Source of the layouts: kimi-k3.md, sections 1, 3 and 9.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from formats.checkpoint import INDEX, PREFIX, SINGLE_FILE
from formats.dtypes import f32_to_bf16
from formats.errors import FormatError
from formats.inventory import Want, expert_geometry, expert_inventory, expert_prefix, source_inventory, text_config
from formats.quantize import block_fp8_quantize
from formats.safetensors import Spec, stream_safetensors

PIECE_VALUES = 1 << 24
VISION = {"vision_tower.encoder.final_layernorm.weight": (8,), "mm_projector.proj.0.weight": (8, 8)}
E4M3_BYTES = (0x68, 0x7F)  # scales from 64 to 448, as in the release
# Root mean squares of what is drawn: any code, any of those scales, any of three neighbouring powers of two.
E2M1_RMS, E4M3_RMS, E8M0_RMS = 2.93, 233.0, 1.32


class Recipe(NamedTuple):
    """What a tensor's values depend on beside its name."""

    seed: int
    live_heads: int
    bounded_gate: bool
    gate_up_ratio: float
    expert_hidden: int
    expert_width: int


def write_checkpoint(
    path: Path,
    config: Mapping[str, Any],
    *,
    seed: int,
    experts: str,
    attention: str,
    shards: int = 1,
    gate_up_ratio: float = 4.0,
) -> None:
    """Write a folder of safetensors with ``config.json``.

    Args:
        path: new folder; other files in it stay.
        config: a ``config.json`` of Kimi K3 or Kimi-Linear, any widths.
        seed: another seed, another model.
        experts: ``"nvfp4"`` (ModelOpt), ``"mxfp4"`` (compressed-tensors) or ``"bf16"``.
        attention: ``"fp8"`` (ModelOpt, blocks of 128) or ``"bf16"``.
        shards: files; with more than one there is an index.
        gate_up_ratio: spread of an expert's gate weights over that of its up weights.

    Raises:
        FormatError: ``path`` holds safetensors already, or ``config`` lacks a size.
    """
    path.mkdir(parents=True, exist_ok=True)
    if any(path.glob("*.safetensors*")):
        raise FormatError(f"{path} holds safetensors already, want a folder without")
    if experts not in ("nvfp4", "mxfp4", "bf16") or attention not in ("fp8", "bf16"):
        raise ValueError(f"experts is {experts!r}, attention {attention!r}, want nvfp4, mxfp4 or bf16, and fp8 or bf16")
    linear, geometry = text_config(config)["linear_attn_config"], expert_geometry(config)
    bounded = linear.get("gate_lower_bound") is not None
    recipe = Recipe(seed, linear["num_heads"], bounded, gate_up_ratio, geometry.hidden, geometry.width)
    prefix = PREFIX if config["model_type"] == "kimi_k3" else ""
    modules = [
        [Spec(prefix + name, want.dtypes[0], want.shapes[0]) for name, want in module.items()]
        for module in _modules(config, experts, attention)
    ]
    if prefix:
        modules += [[Spec(name, "bfloat16", shape)] for name, shape in VISION.items()]
    files = _split(modules, shards)
    for file, specs in files.items():
        stream_safetensors(path / file, specs, _maker(specs, prefix, recipe), {"format": "pt"})
    if len(files) > 1:
        shard_of = {spec.name: file for file, specs in files.items() for spec in specs}
        total = sum(spec.nbytes for specs in files.values() for spec in specs)
        _write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))})
    _write_configs(path, config, experts, attention, _quantized(modules))


def _modules(config: Mapping[str, Any], experts: str, attention: str) -> Iterator[dict[str, Want]]:
    """Tensors that must share a file: a weight with its scales, an expert with all of its own."""
    fp8 = [name.removesuffix(".weight") for name in source_inventory(config) if ".self_attn." in name]
    trunk = source_inventory(config, fp8 if attention == "fp8" else ())
    for name, want in trunk.items():
        if not name.endswith(".weight_scale"):
            scale = f"{name}_scale"
            yield {name: want} | ({scale: trunk[scale]} if scale in trunk else {})
    geometry = expert_geometry(config)
    expert = expert_inventory(geometry, experts) if geometry.layers else {}
    for layer in geometry.layers:
        for number in range(geometry.experts):
            prefix = expert_prefix(layer, number)
            yield {prefix + name: want for name, want in expert.items()}


def _quantized(modules: list[list[Spec]]) -> list[str]:
    """Modules with scales, the experts of a layer as one, as ModelOpt lists them."""
    names = (
        spec.name.removesuffix(".weight_scale") for module in modules for spec in module if "weight_scale" in spec.name
    )
    return list(
        dict.fromkeys(name.split(".experts.")[0] + ".experts" if ".experts." in name else name for name in names)
    )


def _split(modules: list[list[Spec]], shards: int) -> dict[str, list[Spec]]:
    """Deal modules to files of about equal size, in order."""
    total = sum(spec.nbytes for module in modules for spec in module)
    files: list[list[Spec]] = [[] for _ in range(min(shards, len(modules)))]
    begin = 0
    for left, module in zip(range(len(modules), 0, -1), modules, strict=True):
        # The second bound leaves a module for each later file, so that none stays empty.
        number = max(begin * len(files) // max(total, 1), len(files) - left)
        files[min(number, len(files) - 1)] += module
        begin += sum(spec.nbytes for spec in module)
    files = [specs for specs in files if specs]
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": specs for i, specs in enumerate(files, 1)}


def _maker(specs: list[Spec], prefix: str, recipe: Recipe) -> Callable[[Spec], Iterable[np.ndarray]]:
    """Function that gives a tensor's bytes in pieces. Scales of an FP8 weight are kept until their turn."""
    scales: dict[str, np.ndarray] = {}

    def make(spec: Spec) -> Iterator[np.ndarray]:
        name = spec.name.removeprefix(prefix)
        if ".experts." in name:
            yield _expert(recipe, name, spec)
        elif name in scales:
            yield scales.pop(name)
        elif spec.dtype == "float8_e4m3fn":
            parts = []
            for piece in _values(recipe, name, spec.shape):
                byte_nk, scale = block_fp8_quantize(piece)
                parts.append(scale)
                yield byte_nk
            scales[f"{name}_scale"] = np.concatenate(parts)
        else:
            for piece in _values(recipe, name, spec.shape):
                yield f32_to_bf16(piece) if spec.dtype == "bfloat16" else piece

    return make


def _random(recipe: Recipe, name: str) -> np.random.Generator:
    key = hashlib.sha256(f"{recipe.seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))


def _values(recipe: Recipe, name: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """float32 values of a tensor of the trunk, some rows at a time; a multiple of 128 rows but for the last piece."""
    random = _random(recipe, name)
    if name.endswith(".A_log"):
        live = np.log(random.uniform(1, 16, recipe.live_heads)).astype(np.float32)
        yield np.concatenate([live, np.zeros(math.prod(shape) - len(live), np.float32)])
    elif name.endswith(".dt_bias"):
        if recipe.bounded_gate:
            yield random.uniform(-6, 2, shape).astype(np.float32)
        else:
            step = np.exp(random.uniform(np.log(1e-3), np.log(0.1), shape))
            # Inverse of softplus.
            yield (step + np.log(-np.expm1(-step))).astype(np.float32)
    elif name.endswith(".e_score_correction_bias"):
        yield (random.standard_normal(shape) * 0.05).astype(np.float32)
    elif "norm.weight" in name:
        yield (1 + 0.1 * random.standard_normal(shape)).astype(np.float32)
    else:
        rows = max(PIECE_VALUES // math.prod(shape[1:]) // 128, 1) * 128
        for begin in range(0, shape[0], rows):
            piece = random.standard_normal((min(rows, shape[0] - begin), *shape[1:]), np.float32)
            piece *= np.float32(_deviation(name, shape))
            yield piece


def _deviation(name: str, shape: tuple[int, ...]) -> float:
    """Standard deviation that keeps what the weight yields near 1."""
    if "embed_tokens" in name:
        return 1.0
    if "conv1d" in name:
        return 0.5
    return (2.0 if name.startswith("lm_head") else 1.0) / math.sqrt(shape[-1])


def _expert(recipe: Recipe, name: str, spec: Spec) -> np.ndarray:
    """One tensor of a routed expert."""
    random = _random(recipe, name)
    prefix, part, kind = name.rsplit(".", 2)
    columns = recipe.expert_hidden if part == "w2" else recipe.expert_width
    # Experts differ in spread by up to four, so that no two share their globals.
    spread = 2 ** _random(recipe, prefix).uniform(-1, 1)
    ratio = {"w1": recipe.gate_up_ratio**0.5, "w3": recipe.gate_up_ratio**-0.5, "w2": spread**-2}[part]
    deviation = spread * ratio / math.sqrt(columns)
    if kind == "input_scale":
        return np.ones(spec.shape, np.float32)
    if kind == "weight_scale_2":
        # An FTW folder keeps this scale in float16: draw one that it can hold.
        return np.full(spec.shape, np.float16(deviation / (E2M1_RMS * E4M3_RMS)), np.float32)
    if spec.dtype == "bfloat16":
        return f32_to_bf16(random.standard_normal(spec.shape, np.float32) * np.float32(deviation))
    if spec.dtype == "float8_e4m3fn":
        return random.integers(*E4M3_BYTES, spec.shape, dtype=np.uint8)
    if kind == "weight_scale":
        middle = 127 + round(math.log2(deviation / (E2M1_RMS * E8M0_RMS)))
        return random.integers(middle - 1, middle + 2, spec.shape, dtype=np.uint8)
    return random.integers(0, 256, spec.shape, dtype=np.uint8)


def _write_json(path: Path, node: Any) -> None:
    path.write_text(json.dumps(node, indent=2) + "\n")


def _write_configs(path: Path, config: Mapping[str, Any], experts: str, attention: str, modules: list[str]) -> None:
    """Write ``config.json`` with the ``quantization_config`` of whichever tool would have made the folder.

    Args:
        path: the folder.
        config: without quantisation.
        experts: as in :func:`write_checkpoint`.
        attention: likewise.
        modules: names of the quantised ones, with their prefix.
    """
    config = dict(config)
    text = dict(config["text_config"]) if "text_config" in config else config
    if experts == "mxfp4":
        weights = {
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
            "symmetric": True,
            "scale_dtype": "torch.uint8",
            "dynamic": False,
        }
        text["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": [
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|gate_up|up|down)_proj.*",
                "lm_head",
            ],
        }
    if "text_config" in config:
        config["text_config"] = text
    if experts == "nvfp4" or attention == "fp8":
        layers = {
            name: {"quant_algo": "NVFP4", "group_size": 16} if ".experts" in name else {"quant_algo": "FP8_PB_WO"}
            for name in modules
        }
        quantization = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
        config["quantization_config"] = {"quant_method": "modelopt_mixed", "group_size": 16, **quantization}
        producer = {"name": "modelopt", "version": "0.45.0"}
        _write_json(path / "hf_quant_config.json", {"producer": producer, "quantization": quantization})
    _write_json(path / "config.json", config)
