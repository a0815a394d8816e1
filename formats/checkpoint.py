"""A source checkpoint: a folder with ``config.json`` and safetensors, checked whole before a byte of it is used.

The shards are those that ``model.safetensors.index.json`` names, or else the one file ``model.safetensors``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from formats.errors import FormatError
from formats.inventory import (
    FP8_BLOCK,
    ExpertGeometry,
    Want,
    expert_geometry,
    expert_inventory,
    expert_prefix,
    source_inventory,
)
from formats.safetensors import Tensor, parse_json, read_header

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PREFIX = "language_model."
DROPPED = ("vision_tower.", "mm_projector.")


@dataclass(frozen=True)
class Checkpoint:
    """An open source folder. Names lack the ``language_model.`` prefix; vision tensors are left out."""

    root: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    expert_format: str  # "nvfp4", "mxfp4" or "bf16"
    geometry: ExpertGeometry


def open_checkpoint(path: Path) -> Checkpoint:
    """Read every header of a source folder and check it against its configuration.

    Args:
        path: the folder.

    Raises:
        FormatError: a file is absent or damaged, the index disagrees with the shards, or the tensors are not exactly
            those that the configuration calls for.
    """
    config = parse_json(_bytes(path / "config.json"), path / "config.json")
    tensors = _without_prefix(_shards(path))
    geometry = expert_geometry(config)
    expert_format = _expert_format(path, tensors, geometry)
    _check_block_size(path, config)
    _check(path, tensors, _wants(config, tensors, geometry, expert_format))
    return Checkpoint(path, config, tensors, expert_format, geometry)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise FormatError(f"{path} is missing, want it in a source checkpoint") from None


def _shards(root: Path) -> dict[str, Tensor]:
    """Every tensor of the folder by its full name."""
    if not (root / INDEX).exists():
        if not (root / SINGLE_FILE).is_file():
            raise FormatError(f"{root} holds neither {INDEX} nor {SINGLE_FILE}, want a checkpoint in safetensors")
        return read_header(root / SINGLE_FILE)
    index = root / INDEX
    shard_of = parse_json(_bytes(index), index).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(file, str) for file in shard_of.values()):
        raise FormatError(f"{index} has no weight_map from names to files, want one")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(shard_of.values())):
        parts = PurePosixPath(file)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise FormatError(f"{index} names the file {file!r}, want a path inside the folder")
        if not (root / file).is_file():
            raise FormatError(f"{root / file} is missing, but {INDEX} puts tensors into it: want all shards")
        for name, tensor in read_header(root / file).items():
            if name in tensors:
                raise FormatError(f"{name} is in {tensors[name].file} and in {tensor.file}, want it in one shard")
            if shard_of.get(name) != file:
                where = f"puts it into {shard_of[name]}" if name in shard_of else "does not name it"
                raise FormatError(f"{tensor.file} holds {name}, but {INDEX} {where}: want the two to agree")
            tensors[name] = tensor
    for name, file in shard_of.items():
        if name not in tensors:
            raise FormatError(f"{root / file} lacks {name}, which {INDEX} puts into it: want it there")
    return tensors


def _without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take off the wrapper's prefix and leave out what is not text."""
    text: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        name = full.removeprefix(PREFIX)
        if name.startswith(DROPPED):
            continue
        if name in text:
            raise FormatError(f"{tensor.file} holds {full}, but {text[name].file} has it too, want it once")
        text[name] = tensor._replace(name=name)
    return text


def _expert_format(root: Path, tensors: dict[str, Tensor], geometry: ExpertGeometry) -> str:
    """Number format of the routed experts, told from the names of the first one."""
    if not geometry.layers:
        return "bf16"
    prefix = expert_prefix(geometry.layers[0], 0)
    if f"{prefix}w1.weight_global_scale" in tensors:
        raise FormatError(
            f"{root} holds compressed-tensors NVFP4 experts (weight_global_scale), want ModelOpt's weight_scale_2"
        )
    for name, expert_format in (("weight_packed", "mxfp4"), ("weight_scale_2", "nvfp4"), ("weight", "bf16")):
        if f"{prefix}w1.{name}" in tensors:
            return expert_format
    raise FormatError(
        f"{root} lacks {prefix}w1.weight and {prefix}w1.weight_packed, want experts in NVFP4, MXFP4 or bf16"
    )


def _check_block_size(root: Path, config: dict[str, Any]) -> None:
    """Refuse block FP8 of another block size than the one read here."""
    for node in (config, config.get("text_config")):
        quantization = node.get("quantization_config") if isinstance(node, dict) else None
        block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
        if block not in (None, [FP8_BLOCK, FP8_BLOCK]):
            raise FormatError(f"{root / 'config.json'} has weight_block_size {block}, want [{FP8_BLOCK}, {FP8_BLOCK}]")


def _wants(
    config: dict[str, Any], tensors: dict[str, Tensor], geometry: ExpertGeometry, expert_format: str
) -> Iterator[tuple[str, Want]]:
    """Every tensor that the checkpoint must have."""
    scales = (name for name in tensors if name.endswith(".weight_scale") and ".experts." not in name)
    scaled = {name.removesuffix(".weight_scale") for name in scales}
    yield from source_inventory(config, scaled).items()
    expert = expert_inventory(geometry, expert_format) if geometry.layers else {}
    for layer in geometry.layers:
        for number in range(geometry.experts):
            prefix = expert_prefix(layer, number)
            for name, want in expert.items():
                yield prefix + name, want


def _check(root: Path, tensors: dict[str, Tensor], wants: Iterator[tuple[str, Want]]) -> None:
    """Raise unless the tensors are exactly the wanted ones."""
    known = set()
    for name, want in wants:
        tensor = tensors.get(name)
        if tensor is None:
            if want.optional:
                continue
            raise FormatError(f"{root} lacks {name}, want it as {_text(want.dtypes[0], want.shapes[0])} by config.json")
        if tensor.dtype not in want.dtypes or tensor.shape not in want.shapes:
            allowed = " or ".join(_text("/".join(want.dtypes), shape) for shape in want.shapes)
            raise FormatError(
                f"{tensor.file}: {name} is {_text(tensor.dtype, tensor.shape)}, want {allowed} by config.json"
            )
        known.add(name)
    extra = [tensor for name, tensor in tensors.items() if name not in known]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise FormatError(f"{extra[0].file} holds {extra[0].name}{more}, want only tensors that config.json calls for")


def _text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
