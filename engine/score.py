"""How likely a model finds a text."""

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from engine.errors import RequestError
from engine.generate import Model, extend, new_sequence
from engine.requests import check_ids
from ops.sampling import log_prob


class Score(NamedTuple):
    """Log-probabilities (natural logarithm) of a text's tokens; the first has none."""

    token_ids: list[int]
    log_probs: list[float | None]
    perplexity: float  # exp of the mean negative log-probability


def score_text(model: Model, ids: tuple[int, ...], chunk: int, logits_file: Path | None = None) -> Score:
    """Score ``ids``, in steps of ``chunk`` tokens.

    Args:
        model: see ``engine.generate``.
        ids: at least two tokens.
        chunk: most tokens in one step; does not change a bit of the result.
        logits_file: where to write the logits, float32 [tokens, vocab] in numpy's format; appears when complete.

    Raises:
        RequestError: fewer than two tokens, or an id outside the vocabulary.
        CapacityError: the text is longer than the model's positions.
    """
    if len(ids) < 2:
        raise RequestError(f"the text is {len(ids)} tokens, want at least two")
    check_ids(ids, model.cfg.vocab)
    sequence = new_sequence(model, len(ids))
    log_probs: list[float | None] = [None]
    partial = None if logits_file is None else logits_file.with_name(f".{logits_file.name}.partial")
    if partial is not None:
        out = np.lib.format.open_memmap(partial, "w+", np.float32, (len(ids), model.cfg.vocab))
    for past in range(0, len(ids), chunk):
        part = list(ids[past : past + chunk])
        logits_tv = extend(model, sequence, part, past, range(len(part)))
        if partial is not None:
            out[past : past + len(part)] = logits_tv.cpu().numpy()
        following = ids[past + 1 : past + 1 + len(part)]
        next_t = torch.tensor(following, dtype=torch.int32, device=model.device)
        log_probs += log_prob(logits_tv[: len(following)], next_t).tolist()
    if partial is not None and logits_file is not None:
        _finish(out, partial, logits_file)
    known = [value for value in log_probs if value is not None]
    return Score(list(ids), log_probs, math.exp(-math.fsum(known) / len(known)))


def _finish(out: np.memmap, partial: Path, final: Path) -> None:
    """Make the file durable, then give it its name."""
    out.flush()
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.rename(final)
