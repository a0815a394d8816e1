"""Source folders: a made-up one of each kind opens; every disagreement is one error that names the culprit."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.presets import KIMI_K3, scale
from formats.checkpoint import INDEX, open_checkpoint
from formats.errors import FormatError
from formats.safetensors import read, read_header, write_safetensors
from formats.synthetic import write_checkpoint

TINY = scale(
    KIMI_K3,
    layers=4,
    kda_heads=2,
    kda_head_dim=16,
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    num_experts=2,
    num_experts_per_token=1,
    moe_intermediate_size=32,
    routed_expert_hidden_size=32,
    attn_res_block_size=2,
)
LINEAR = TINY["text_config"] | {
    "hidden_act": "silu",
    "mla_use_output_gate": False,
    "q_lora_rank": None,
    "routed_expert_hidden_size": None,
    "attn_res_block_size": None,
    "linear_attn_config": TINY["text_config"]["linear_attn_config"]
    | {"use_full_rank_gate": False, "gate_lower_bound": None},
}
KINDS = {
    "nvfp4": (TINY, "nvfp4", "fp8", 3),
    "mxfp4": (TINY, "mxfp4", "bf16", 1),
    "bf16": (TINY, "bf16", "fp8", 2),
    "linear": (LINEAR, "bf16", "bf16", 1),
}
EXPERT = "model.layers.1.block_sparse_moe.experts.0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for kind, (config, experts, attention, shards) in KINDS.items():
        write_checkpoint(folder / kind, config, seed=1, experts=experts, attention=attention, shards=shards)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Function that gives a private copy of one kind."""
    return lambda kind: shutil.copytree(made / kind, tmp_path / "source")


def edit(path: Path, change: Callable[[dict[str, tuple[str, np.ndarray]]], Any]) -> None:
    """Rewrite a shard after a change to its tensors, given by their full names."""
    tensors = {name: (tensor.dtype, read(tensor)) for name, tensor in read_header(path).items()}
    change(tensors)
    write_safetensors(path, tensors)


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    node = json.loads(path.read_text())
    change(node)
    path.write_text(json.dumps(node))


def refused(path: Path, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_folder_opens(made: Path, kind: str) -> None:
    config, experts, _, shards = KINDS[kind]
    checkpoint = open_checkpoint(made / kind)
    assert checkpoint.expert_format == experts
    assert checkpoint.geometry == ((1, 2, 3), 2, 32, 32)
    assert not any(
        name.startswith(("language_model.", "vision_tower.", "mm_projector.")) for name in checkpoint.tensors
    )
    assert all(tensor.name == name for name, tensor in checkpoint.tensors.items())
    assert len({tensor.file for tensor in checkpoint.tensors.values()}) == shards
    assert checkpoint.config["model_type"] == config["model_type"]


def test_other_files_do_not_matter(copy: Callable[[str], Path]) -> None:
    source = copy("nvfp4")
    (source / "consolidated.safetensors").write_bytes(b"not of the index")
    assert open_checkpoint(source).expert_format == "nvfp4"


def test_links_out_of_the_folder_are_followed(copy: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy("mxfp4")
    shutil.move(source / "model.safetensors", tmp_path / "blob")
    (source / "model.safetensors").symlink_to(tmp_path / "blob")
    assert open_checkpoint(source).expert_format == "mxfp4"


@pytest.mark.timeout(5)
def test_a_shard_deleted(copy: Callable[[str], Path]) -> None:
    source = copy("nvfp4")
    (source / "model-00002-of-00003.safetensors").unlink()
    refused(
        source, r"model-00002-of-00003\.safetensors is missing, but model.safetensors.index.json puts tensors into it"
    )


@pytest.mark.timeout(5)
@pytest.mark.parametrize("cut", [1, 4096])
def test_a_shard_cut_short(copy: Callable[[str], Path], cut: int) -> None:
    path = copy("nvfp4") / "model-00003-of-00003.safetensors"
    os.truncate(path, path.stat().st_size - cut)
    refused(path.parent, rf"model-00003-of-00003\.safetensors holds \d+ bytes, want \d+ .*{cut} missing")


def test_a_whole_tensor_cut_off(copy: Callable[[str], Path]) -> None:
    path = copy("mxfp4") / "model.safetensors"
    last = list(read_header(path).values())[-1]
    os.truncate(path, last.offset)
    refused(path.parent, rf"model\.safetensors holds .*: {last.nbytes} missing")


def test_a_tensor_in_two_shards(copy: Callable[[str], Path]) -> None:
    source = copy("nvfp4")
    name, tensor = next(iter(read_header(source / "model-00001-of-00003.safetensors").items()))
    edit(source / "model-00002-of-00003.safetensors", lambda t: t.update({name: (tensor.dtype, read(tensor))}))
    refused(source, rf"{name} is in .*model-00001.* and in .*model-00002.*, want it in one shard")


def test_a_tensor_that_the_index_lacks(copy: Callable[[str], Path]) -> None:
    source = copy("nvfp4")
    edit_json(source / INDEX, lambda node: node["weight_map"].pop("language_model.model.norm.weight"))
    refused(source, r"model-\d+-of-00003\.safetensors holds language_model.model.norm.weight, but .* does not name it")


def test_a_tensor_that_only_the_index_has(copy: Callable[[str], Path]) -> None:
    source, file = copy("nvfp4"), "model-00001-of-00003.safetensors"
    edit_json(source / INDEX, lambda node: node["weight_map"].update({"language_model.ghost": file}))
    refused(source, rf"{file} lacks language_model.ghost, which {INDEX} puts into it")


def test_a_tensor_in_another_shard_than_stated(copy: Callable[[str], Path]) -> None:
    source, name = copy("nvfp4"), "language_model.model.embed_tokens.weight"
    edit_json(source / INDEX, lambda node: node["weight_map"].update({name: "model-00003-of-00003.safetensors"}))
    refused(source, rf"model-00001.* holds {name}, but {INDEX} puts it into model-00003")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/../../b", ""])
def test_a_path_out_of_the_folder(copy: Callable[[str], Path], file: str) -> None:
    source = copy("nvfp4")
    edit_json(source / INDEX, lambda node: node["weight_map"].update({"x": file}))
    refused(source, rf"{INDEX} names the file {file!r}, want a path inside the folder")


@pytest.mark.parametrize("weight_map", [None, [], {"a": 3}])
def test_an_index_without_a_map(copy: Callable[[str], Path], weight_map: Any) -> None:
    source = copy("nvfp4")
    edit_json(source / INDEX, lambda node: node.update(weight_map=weight_map))
    refused(source, "no weight_map from names to files")


def test_a_name_twice_in_the_index(copy: Callable[[str], Path]) -> None:
    source = copy("nvfp4")
    (source / INDEX).write_text('{"weight_map": {"a": "b", "a": "c"}}')
    refused(source, rf"{INDEX} names 'a' twice")


def test_a_name_with_and_without_the_prefix(copy: Callable[[str], Path]) -> None:
    source = copy("mxfp4")
    edit(source / "model.safetensors", lambda t: t.update({"model.norm.weight": t["language_model.model.norm.weight"]}))
    refused(source, "holds .*model.norm.weight, but .* has it too, want it once")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_missing(copy: Callable[[str], Path], name: str) -> None:
    """B14; a shard that is missing, a tensor that is renamed or occurs twice are among the changes below."""
    source = copy("mxfp4")
    (source / name).unlink()
    refused(source, r"config\.json is missing|holds neither model.safetensors.index.json nor model.safetensors")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "llama"}'])
def test_a_config_that_is_none(copy: Callable[[str], Path], text: str) -> None:
    source = copy("mxfp4")
    (source / "config.json").write_text(text)
    refused(source, r"config\.json")


CHANGES: dict[str, tuple[str, Callable[[dict[str, tuple[str, np.ndarray]]], Any], str]] = {
    "renamed": (
        "mxfp4",
        lambda t: t.update({"language_model.model.norm.gain": t.pop("language_model.model.norm.weight")}),
        r"lacks model.norm.weight, want it as bfloat16 \[32\]",
    ),
    "extra": (
        "mxfp4",
        lambda t: t.update(
            {"language_model.model.extra": ("uint8", np.zeros(2, np.uint8)), "y": ("uint8", np.zeros(1, np.uint8))}
        ),
        r"model\.safetensors holds (model.extra|y) and 1 more, want only tensors that config.json calls for",
    ),
    "mistyped": (
        "mxfp4",
        lambda t: t.update(
            {"language_model.lm_head.weight": ("float16", t["language_model.lm_head.weight"][1].view(np.float16))}
        ),
        r"model\.safetensors: lm_head.weight is float16 \[24, 32\], want bfloat16/float32 \[24, 32\]",
    ),
    "transposed": (
        "mxfp4",
        lambda t: t.update({"language_model.lm_head.weight": ("bfloat16", t["language_model.lm_head.weight"][1].T)}),
        r"lm_head.weight is bfloat16 \[32, 24\], want",
    ),
    "expert missing": (
        "linear",
        lambda t: t.pop("model.layers.3.block_sparse_moe.experts.1.w2.weight"),
        r"lacks model.layers.3.block_sparse_moe.experts.1.w2.weight, want it as bfloat16 \[32, 32\]",
    ),
    "expert beyond the last": (
        "linear",
        lambda t: t.update({"model.layers.1.block_sparse_moe.experts.2.w1.weight": t[f"{EXPERT}.w1.weight"]}),
        r"holds model.layers.1.block_sparse_moe.experts.2.w1.weight, want only",
    ),
    "expert of another format": (
        "mxfp4",
        lambda t: t.update({f"language_model.{EXPERT}.w2.weight": t.pop(f"language_model.{EXPERT}.w2.weight_packed")}),
        r"lacks model.layers.1.block_sparse_moe.experts.0.w2.weight_packed",
    ),
    "no first expert": (
        "linear",
        lambda t: t.pop(f"{EXPERT}.w1.weight"),
        "want experts in NVFP4, MXFP4 or bf16",
    ),
    "compressed-tensors nvfp4": (
        "mxfp4",
        lambda t: t.update({f"language_model.{EXPERT}.w1.weight_global_scale": ("float32", np.ones(1, np.float32))}),
        "compressed-tensors NVFP4 experts .* want ModelOpt's weight_scale_2",
    ),
    "scale without fp8": (
        "mxfp4",
        lambda t: t.update(
            {
                "language_model.model.layers.0.self_attn.q_proj.weight_scale": (
                    "float32",
                    np.ones((1, 1, 1, 1), np.float32),
                )
            }
        ),
        r"q_proj.weight is bfloat16 \[32, 32\], want float8_e4m3fn",
    ),
}


@pytest.mark.timeout(5)
@pytest.mark.parametrize("change", CHANGES)
def test_tensors_that_the_config_does_not_call_for(copy: Callable[[str], Path], change: str) -> None:
    kind, alter, message = CHANGES[change]
    source = copy(kind)
    edit(source / "model.safetensors", alter)
    refused(source, message)


def test_fp8_without_its_scale(copy: Callable[[str], Path]) -> None:
    source, name = copy("bf16"), "language_model.model.layers.0.self_attn.q_proj.weight_scale"
    file = json.loads((source / INDEX).read_text())["weight_map"][name]
    edit(source / file, lambda t: t.pop(name))
    edit_json(source / INDEX, lambda node: node["weight_map"].pop(name))
    refused(source, r"q_proj.weight is float8_e4m3fn \[32, 32\], want bfloat16/float32")


def test_input_scale_may_be_absent_and_global_scales_may_have_an_axis(copy: Callable[[str], Path]) -> None:
    source = copy("nvfp4")
    names = [name for name in json.loads((source / INDEX).read_text())["weight_map"] if name.endswith(".input_scale")]

    def change(tensors: dict[str, tuple[str, np.ndarray]]) -> None:
        for name in names:
            tensors.pop(name, None)
        for name, (dtype, array) in tensors.items():
            tensors[name] = dtype, array.reshape(1) if name.endswith(".weight_scale_2") else array

    for file in sorted(source.glob("*.safetensors")):
        edit(file, change)
    edit_json(source / INDEX, lambda node: [node["weight_map"].pop(name) for name in names])
    assert names and open_checkpoint(source).tensors[f"{EXPERT}.w1.weight_scale_2"].shape == (1,)


@pytest.mark.parametrize("size", [2, 128])
def test_a_log_in_any_of_its_shapes(copy: Callable[[str], Path], size: int) -> None:
    source, name = copy("mxfp4"), "language_model.model.layers.0.self_attn.A_log"
    edit(source / "model.safetensors", lambda t: t.update({name: ("float32", np.zeros(size, np.float32))}))
    assert open_checkpoint(source).tensors["model.layers.0.self_attn.A_log"].shape == (size,)


def test_a_log_per_channel_is_refused(copy: Callable[[str], Path]) -> None:
    source, name = copy("mxfp4"), "language_model.model.layers.0.self_attn.A_log"
    edit(source / "model.safetensors", lambda t: t.update({name: ("float32", np.zeros(32, np.float32))}))
    refused(source, r"A_log is float32 \[32\], want float32/bfloat16 \[128\] or .* \[2\] or .* \[1, 1, 2, 1\]")


def test_a_width_that_the_config_gets_wrong(copy: Callable[[str], Path]) -> None:
    source = copy("mxfp4")
    edit_json(source / "config.json", lambda node: node["text_config"].update(vocab_size=25))
    refused(source, r"embed_tokens.weight is bfloat16 \[24, 32\], want bfloat16/float32 \[25, 32\] by config.json")


def test_another_block_size_is_refused(copy: Callable[[str], Path]) -> None:
    source = copy("bf16")
    edit_json(source / "config.json", lambda node: node["quantization_config"].update(weight_block_size=[64, 64]))
    refused(source, r"config\.json has weight_block_size \[64, 64\], want \[128, 128\]")
