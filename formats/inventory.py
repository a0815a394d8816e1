"""Which tensors a model must have, computed from its ``config.json`` alone.

Names are a checkpoint's without the ``language_model.`` prefix. Kimi K3 and Kimi-Linear share every rule; what one has
and the other lacks follows from the configuration. A matrix is FP8 if there is a ``weight_scale`` beside it.

Source: kimi-k3.md, sections 3 and 9; ftw.md, section 3.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from formats.errors import FormatError
from formats.safetensors import Tensor

FP8_BLOCK = 128
PLAIN = ("bfloat16", "float32")
SINGLE = ("float32", "bfloat16")

Shape = tuple[int, ...]


class Want(NamedTuple):
    """What a tensor may be. The first dtype and shape are the release's own."""

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    optional: bool = False


class ExpertGeometry(NamedTuple):
    """Sizes of the routed experts."""

    layers: tuple[int, ...]  # model layers that have them, from 0
    experts: int
    hidden: int  # rows of w1 and w3, columns of w2
    width: int  # columns of w1 and w3, rows of w2


class Resident(NamedTuple):
    """One resident tensor of an FTW folder and the source tensors, one under the other, that it is made of."""

    name: str
    dtype: str
    shape: Shape
    sources: tuple[str, ...]
    dequantise: bool  # those sources that are FP8 become bf16; otherwise the sources' bytes follow each other


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a ``config.json`` that describes the text model.

    Raises:
        FormatError: another kind of model.
    """
    if config.get("model_type") not in ("kimi_k3", "kimi_linear"):
        raise FormatError(f"config.json has model_type {config.get('model_type')!r}, want 'kimi_k3' or 'kimi_linear'")
    text = config.get("text_config", config)
    for key, node in (("text_config", text), ("linear_attn_config", _dict(text).get("linear_attn_config"))):
        if not isinstance(node, dict):
            raise FormatError(f"config.json has {key} {node!r}, want an object")
    return text


def _dict(node: Any) -> dict[str, Any]:
    return node if isinstance(node, dict) else {}


def _size(text: Mapping[str, Any], key: str) -> int:
    if type(text.get(key)) is not int or text[key] < 1:
        raise FormatError(f"config.json has {key} {text.get(key)!r}, want an integer from 1")
    return text[key]


def expert_geometry(config: Mapping[str, Any]) -> ExpertGeometry:
    """Sizes of the routed experts; no layers if the model has none."""
    text = text_config(config)
    if not text.get("num_experts"):
        return ExpertGeometry((), 0, 0, 0)
    first = _size(text, "first_k_dense_replace") if text.get("first_k_dense_replace") else 0
    step = _size(text, "moe_layer_freq") if "moe_layer_freq" in text else 1
    layers = tuple(i for i in range(_size(text, "num_hidden_layers")) if i >= first and i % step == 0)
    width = "routed_expert_hidden_size" if text.get("routed_expert_hidden_size") else "hidden_size"
    return ExpertGeometry(layers, _size(text, "num_experts"), _size(text, "moe_intermediate_size"), _size(text, width))


def source_inventory(config: Mapping[str, Any], fp8: Collection[str] = ()) -> dict[str, Want]:
    """All tensors but the routed experts', in the model's order.

    Args:
        config: parsed ``config.json``.
        fp8: modules that have a ``weight_scale``; those that may not have one are ignored.

    Raises:
        FormatError: a size is missing or no size.
    """
    wants: dict[str, Want] = {}
    for name, want in _trunk(config):
        rows, *rest = want.shapes[0]
        module = name.removesuffix(".weight")
        if module in fp8 and "_proj" in module.rpartition(".")[2] and rest and rows > 1:
            blocks = -(-rows // FP8_BLOCK), -(-rest[0] // FP8_BLOCK)
            wants[name] = Want(("float8_e4m3fn",), want.shapes)
            wants[f"{name}_scale"] = Want(("float32",), ((blocks[0], 1, blocks[1], 1), blocks))
        else:
            wants[name] = want
    return wants


def _matrix(*shape: int) -> Want:
    return Want(PLAIN, (shape,))


def _trunk(config: Mapping[str, Any]) -> Iterator[tuple[str, Want]]:
    """The unquantised tensors of the whole model without its routed experts."""
    text = text_config(config)
    width, vocab, mixes = _size(text, "hidden_size"), _size(text, "vocab_size"), bool(text.get("attn_res_block_size"))
    single = SINGLE if config["model_type"] == "kimi_k3" else PLAIN
    full = text["linear_attn_config"].get("full_attn_layers")
    if not isinstance(full, list):
        raise FormatError(f"config.json has full_attn_layers {full!r}, want a list of layers from 1")
    moe = expert_geometry(config).layers
    yield "model.embed_tokens.weight", _matrix(vocab, width)
    for i in range(_size(text, "num_hidden_layers")):
        at = f"model.layers.{i}"
        if mixes:
            for part in ("self_attention", "mlp"):
                yield f"{at}.{part}_res_norm.weight", _matrix(width)
                yield f"{at}.{part}_res_proj.weight", _matrix(1, width)
        yield f"{at}.input_layernorm.weight", _matrix(width)
        # The lists count layers from 1.
        if i + 1 in full:
            yield from _mla(f"{at}.self_attn", text, width)
        else:
            yield from _kda(f"{at}.self_attn", text, width, single)
        yield f"{at}.post_attention_layernorm.weight", _matrix(width)
        if i in moe:
            yield from _moe(f"{at}.block_sparse_moe", text, width)
        else:
            yield from _mlp(f"{at}.mlp", width, _size(text, "intermediate_size"))
    if mixes:
        yield "model.output_attn_res_norm.weight", _matrix(width)
        yield "model.output_attn_res_proj.weight", _matrix(1, width)
    yield "model.norm.weight", _matrix(width)
    if not (config.get("tie_word_embeddings") or text.get("tie_word_embeddings")):
        yield "lm_head.weight", _matrix(vocab, width)


def _kda(at: str, text: Mapping[str, Any], width: int, single: tuple[str, ...]) -> Iterator[tuple[str, Want]]:
    linear = text["linear_attn_config"]
    heads, dim, taps = (_size(linear, key) for key in ("num_heads", "head_dim", "short_conv_kernel_size"))
    size, padded = heads * dim, -(-heads // 128) * 128
    for name in "qkv":
        yield f"{at}.{name}_proj.weight", _matrix(size, width)
    for name in "qkv":
        yield f"{at}.{name}_conv1d.weight", Want(single, ((size, 1, taps),))
    shapes = ((padded,), (heads,), (1, 1, heads, 1))
    yield f"{at}.A_log", Want(SINGLE, shapes if single is SINGLE else shapes[::-1])
    yield f"{at}.dt_bias", Want(SINGLE, ((size,),))
    yield f"{at}.f_a_proj.weight", _matrix(dim, width)
    yield f"{at}.f_b_proj.weight", _matrix(size, dim)
    yield f"{at}.b_proj.weight", _matrix(heads, width)
    if linear.get("use_full_rank_gate"):
        yield f"{at}.g_proj.weight", _matrix(size, width)
    else:
        yield f"{at}.g_a_proj.weight", _matrix(dim, width)
        yield f"{at}.g_b_proj.weight", _matrix(size, dim)
    yield f"{at}.o_norm.weight", Want(single, ((dim,),))
    yield f"{at}.o_proj.weight", _matrix(width, size)


def _mla(at: str, text: Mapping[str, Any], width: int) -> Iterator[tuple[str, Want]]:
    keys = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    heads, rank, nope, rope, value = (_size(text, key) for key in keys)
    if text.get("q_lora_rank"):
        q_rank = _size(text, "q_lora_rank")
        yield f"{at}.q_a_proj.weight", _matrix(q_rank, width)
        yield f"{at}.q_a_layernorm.weight", _matrix(q_rank)
        yield f"{at}.q_b_proj.weight", _matrix(heads * (nope + rope), q_rank)
    else:
        yield f"{at}.q_proj.weight", _matrix(heads * (nope + rope), width)
    yield f"{at}.kv_a_proj_with_mqa.weight", _matrix(rank + rope, width)
    yield f"{at}.kv_a_layernorm.weight", _matrix(rank)
    yield f"{at}.kv_b_proj.weight", _matrix(heads * (nope + value), rank)
    if text.get("mla_use_output_gate"):
        yield f"{at}.g_proj.weight", _matrix(heads * value, width)
    yield f"{at}.o_proj.weight", _matrix(width, heads * value)


def _mlp(at: str, width: int, hidden: int) -> Iterator[tuple[str, Want]]:
    yield f"{at}.gate_proj.weight", _matrix(hidden, width)
    yield f"{at}.up_proj.weight", _matrix(hidden, width)
    yield f"{at}.down_proj.weight", _matrix(width, hidden)


def _moe(at: str, text: Mapping[str, Any], width: int) -> Iterator[tuple[str, Want]]:
    experts = _size(text, "num_experts")
    yield f"{at}.gate.weight", _matrix(experts, width)
    yield f"{at}.gate.e_score_correction_bias", Want(SINGLE, ((experts,),))
    if text.get("routed_expert_hidden_size"):
        latent = _size(text, "routed_expert_hidden_size")
        yield f"{at}.routed_expert_down_proj.weight", _matrix(latent, width)
        if text.get("latent_moe_use_norm", True):
            yield f"{at}.routed_expert_norm.weight", _matrix(latent)
        yield f"{at}.routed_expert_up_proj.weight", _matrix(width, latent)
    if text.get("num_shared_experts"):
        hidden = _size(text, "num_shared_experts") * _size(text, "moe_intermediate_size")
        yield from _mlp(f"{at}.shared_experts", width, hidden)


def expert_prefix(layer: int, expert: int) -> str:
    """What the tensor names of one routed expert begin with; the layer is the model's."""
    return f"model.layers.{layer}.block_sparse_moe.experts.{expert}."


def expert_inventory(geometry: ExpertGeometry, expert_format: str) -> dict[str, Want]:
    """Tensors of one routed expert, by their name after :func:`expert_prefix`; all experts are alike.

    Args:
        geometry: sizes.
        expert_format: ``"nvfp4"``, ``"mxfp4"`` or ``"bf16"``.

    Raises:
        FormatError: a row does not divide into whole scale groups.
    """
    wants: dict[str, Want] = {}
    group = {"nvfp4": 16, "mxfp4": 32, "bf16": 1}[expert_format]
    for part, rows, columns in (
        ("w1", geometry.hidden, geometry.width),
        ("w3", geometry.hidden, geometry.width),
        ("w2", geometry.width, geometry.hidden),
    ):
        if columns % group:
            raise FormatError(
                f"config.json gives {part} {columns} columns, want a multiple of {group} for {expert_format}"
            )
        if expert_format == "bf16":
            wants[f"{part}.weight"] = Want(("bfloat16",), ((rows, columns),))
            continue
        packed, scales = ((rows, columns // 2),), ((rows, columns // group),)
        if expert_format == "mxfp4":
            wants[f"{part}.weight_packed"] = Want(("uint8",), packed)
            wants[f"{part}.weight_scale"] = Want(("uint8", "float8_e8m0fnu"), scales)
        else:
            wants[f"{part}.weight"] = Want(("uint8",), packed)
            wants[f"{part}.weight_scale"] = Want(("float8_e4m3fn",), scales)
            wants[f"{part}.weight_scale_2"] = Want(("float32",), ((), (1,)))
            wants[f"{part}.input_scale"] = Want(("float32",), ((), (1,)), optional=True)
    return wants


def ftw_inventory(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Resident]:
    """Resident tensors of the FTW folder made from a checkpoint, in the model's order.

    Args:
        config: parsed ``config.json``.
        tensors: the checkpoint's, already checked against :func:`source_inventory`.

    Raises:
        FormatError: a gate and its up projection differ in dtype and cannot be fused.
    """
    residents: list[Resident] = []
    for name in source_inventory(config):
        if not name.endswith(".up_proj.weight"):
            sources = (
                (name, name.replace(".gate_proj.", ".up_proj.")) if name.endswith(".gate_proj.weight") else (name,)
            )
            residents += _residents([tensors[source] for source in sources])
    return residents


def _residents(parts: list[Tensor]) -> Iterator[Resident]:
    """One resident tensor, and its scales if it stays FP8."""
    names = tuple(part.name for part in parts)
    name = names[0].replace(".gate_proj.", ".gate_up_proj.").replace(".gate.e_score", ".e_score")
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    dtypes = {part.dtype for part in parts}
    if "float8_e4m3fn" not in dtypes:
        if len(dtypes) > 1:
            raise FormatError(
                f"{parts[0].file}: {' and '.join(names)} are {' and '.join(sorted(dtypes))}, want one dtype"
            )
        yield Resident(name, parts[0].dtype, shape, names, dequantise=False)
    elif len(dtypes) > 1 or ".kv_b_proj." in name or any(n % FP8_BLOCK for part in parts for n in part.shape):
        yield Resident(name, "bfloat16", shape, names, dequantise=True)
    else:
        yield Resident(name, "float8_e4m3fn", shape, names, dequantise=False)
        blocks = tuple(n // FP8_BLOCK for n in shape)
        scales = tuple(f"{part}_scale" for part in names)
        yield Resident(f"{name}_scale_inv", "float32", blocks, scales, dequantise=False)
