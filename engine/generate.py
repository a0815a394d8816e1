"""Make tokens: open a model, prefill a prompt in chunks, decode one token a step.

prompt -> chunks -> step -> logits of the last token -> sample -> step -> ...
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.config import PAGE, ModelConfig, load_config
from engine.errors import CapacityError, EngineError
from engine.experts import ExpertStore
from engine.load import load_params
from engine.model import step
from engine.params import Params
from engine.plan import Chunk, make_plan
from engine.requests import Request, Sampling, check_ids
from engine.state import State, new_state
from formats.reader import open_ftw
from ops.sampling import argmax, sample


class Model(NamedTuple):
    """A model ready to run."""

    cfg: ModelConfig
    params: Params
    store: ExpertStore
    dtype: torch.dtype  # of activations
    device: torch.device
    resident_bytes: int

    def bytes_read(self) -> int:
        """Bytes of weights read from the folder so far."""
        return self.resident_bytes + self.store.bytes_read


def open_model(folder: Path, device: torch.device, *, dtype: torch.dtype | None = None, exact: bool = True) -> Model:
    """Load the resident weights of an FTW folder; experts follow as they are routed to.

    Args:
        folder: made by ``rowstream convert``.
        device: see ``engine.device``.
        dtype: of activations, bf16 or fp32. None: bf16 on a card; fp32 in the interpreter, which emulates bf16 slowly.
        exact: see ``ModelConfig.exact``.

    Raises:
        FormatError: the folder is not what its index says.
        EngineError: the configuration is not one this engine runs, or memory does not suffice.
    """
    reader = open_ftw(folder)
    cfg = replace(load_config(folder), exact=exact)
    store = ExpertStore(cfg, reader, device)
    params = load_params(cfg, reader, store.rows, device)
    resident = sum(entry.nbytes for entry in reader.index.entries if entry.kind == "weight")
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    return Model(cfg, params, store, dtype, device, resident)


class Sequence(NamedTuple):
    """One sequence with a state of its own."""

    state: State
    pages: list[int]


def new_sequence(model: Model, length: int) -> Sequence:
    """Room for one sequence of up to ``length`` tokens.

    Raises:
        CapacityError: ``length`` is more than the model was made for.
    """
    if length > model.cfg.max_positions:
        raise CapacityError(
            f"prompt and answer take {length} tokens, the model has {model.cfg.max_positions} positions"
        )
    pages = -(-length // PAGE)
    return Sequence(new_state(model.cfg, 1, pages, model.dtype, model.device), list(range(pages)))


def extend(model: Model, sequence: Sequence, ids: list[int], past: int, wanted: range) -> Tensor:
    """Run the next ``ids`` of a sequence that has seen ``past`` tokens; logits [wanted, vocab].

    WRITTEN: the sequence's state.
    """
    plan = make_plan([Chunk(ids, past, 0, sequence.pages, wanted)], model.device)
    logits_wv, _ = step(model.cfg, model.params, sequence.state, plan, model.store.fetch)
    return logits_wv


def generate(model: Model, request: Request) -> Iterator[int]:
    """Yield the answer's tokens; ends before a stop token or after ``max_tokens``.

    Raises:
        RequestError: an id lies outside the vocabulary.
        CapacityError: prompt and answer are longer than the model's positions.
        EngineError: the model produced no number.
    """
    prompt = request.prompt_ids
    check_ids(prompt, model.cfg.vocab)
    sequence = new_sequence(model, len(prompt) + request.max_tokens)
    logits_v = torch.empty(0)
    for past in range(0, len(prompt), request.prefill_chunk):
        ids = list(prompt[past : past + request.prefill_chunk])
        last = past + len(ids) == len(prompt)
        logits_v = extend(model, sequence, ids, past, range(len(ids) - 1, len(ids)) if last else range(0))
    for position in range(len(prompt), len(prompt) + request.max_tokens):
        token = draw(logits_v, request.sampling, position)
        if token in request.stop_ids:
            return
        yield token
        if position + 1 < len(prompt) + request.max_tokens:
            logits_v = extend(model, sequence, [token], position, range(1))


def draw(logits_bv: Tensor, sampling: Sampling, position: int) -> int:
    """Draw one token from one row of logits. ``position`` is the place that the token will take."""
    if sampling.temperature == 0:
        token_b = argmax(logits_bv)
    else:

        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.tensor([value], dtype=dtype, device=logits_bv.device)

        token_b = sample(
            logits_bv, column(sampling.temperature, torch.float32), column(sampling.top_k, torch.int32),
            column(sampling.top_p, torch.float32), column(sampling.min_p, torch.float32),
            column(sampling.seed, torch.int64), column(position, torch.int32),
        )  # fmt: skip
    token = int(token_b)
    if not 0 <= token < logits_bv.shape[1]:
        raise EngineError(f"the logits at position {position} hold no number: the weights or the state are damaged")
    return token
