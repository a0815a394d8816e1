"""What one step is to do: which tokens of which sequences, and where their state lives.

The tokens of all sequences lie back to back. Everything is known on the host before the step begins, so the step
itself never waits for the device.

Letters: t tokens, b sequences, y page, w wanted rows. Index tensors are int32 unless said otherwise.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.config import PAGE
from engine.errors import CapacityError


class Chunk(NamedTuple):
    """The next tokens of one sequence."""

    ids: list[int]
    past: int  # tokens of the sequence already seen
    slot: int  # row of the recurrent state
    pages: list[int]  # latent pages, position p in page p // PAGE
    wanted: range  # tokens of ``ids`` whose logits are wanted


class Plan(NamedTuple):
    """Index tensors of one step."""

    ids_t: Tensor
    position_t: Tensor  # position of a token in its sequence
    seq_t: Tensor  # sequence of a token
    place_t: Tensor  # int64, row of the latent cache that a token writes
    start_b: Tensor  # [b + 1], first token of each sequence
    past_b: Tensor
    slot_b: Tensor
    pages_by: Tensor
    wanted_w: Tensor  # tokens whose logits are wanted
    n_keys: int  # largest position + 1
    longest: int  # most tokens of one sequence


def make_plan(chunks: list[Chunk], device: torch.device) -> Plan:
    """Lay the chunks of several sequences out as one step.

    Raises:
        CapacityError: a chunk reaches past the pages it was given.
    """
    ids: list[int] = []
    position: list[int] = []
    seq: list[int] = []
    place: list[int] = []
    start, wanted = [0], []
    for b, chunk in enumerate(chunks):
        end = chunk.past + len(chunk.ids)
        if end > len(chunk.pages) * PAGE:
            raise CapacityError(f"sequence {b} reaches position {end}, its {len(chunk.pages)} pages of {PAGE} do not")
        wanted += [start[-1] + i for i in chunk.wanted]
        ids += chunk.ids
        position += range(chunk.past, end)
        seq += [b] * len(chunk.ids)
        place += [chunk.pages[p // PAGE] * PAGE + p % PAGE for p in range(chunk.past, end)]
        start.append(len(ids))
    most = max((len(chunk.pages) for chunk in chunks), default=0)
    pages = [chunk.pages + [0] * (most - len(chunk.pages)) for chunk in chunks]

    def index(values: list, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Plan(
        ids_t=index(ids),
        position_t=index(position),
        seq_t=index(seq),
        place_t=index(place, torch.int64),
        start_b=index(start),
        past_b=index([chunk.past for chunk in chunks]),
        slot_b=index([chunk.slot for chunk in chunks]),
        pages_by=index(pages).view(len(chunks), most),
        wanted_w=index(wanted),
        n_keys=max(position, default=-1) + 1,
        longest=max((len(chunk.ids) for chunk in chunks), default=0),
    )
