"""How likely a model finds a text."""

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from engine.errors import EngineError, RequestError
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
        EngineError: the model gives a token no probability.
    """
    if len(ids) < 2:
        raise RequestError(f"the text is {len(ids)} tokens, want at least two")
    check_ids(ids, model.cfg.vocab)
    if logits_file is None:
        log_probs = _log_probs(model, ids, chunk, None)
    else:
        partial = logits_file.with_name(f".{logits_file.name}.partial")
        try:
            out = np.lib.format.open_memmap(partial, "w+", np.float32, (len(ids), model.cfg.vocab))
            log_probs = _log_probs(model, ids, chunk, out)
            out.flush()
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.rename(logits_file)
        finally:
            partial.unlink(missing_ok=True)
    mean = math.fsum(log_probs) / len(log_probs)
    if not -700 < mean <= 0:
        raise EngineError(f"the mean log-probability is {mean}, want a finite perplexity")
    return Score(list(ids), [None, *log_probs], math.exp(-mean))


def _log_probs(model: Model, ids: tuple[int, ...], chunk: int, out: np.ndarray | None) -> list[float]:
    """Of every token but the first. WRITTEN: out, with the logits of every token."""
    sequence = new_sequence(model, len(ids))
    log_probs: list[float] = []
    for past in range(0, len(ids), chunk):
        part = list(ids[past : past + chunk])
        logits_tv = extend(model, sequence, part, past, range(len(part)))
        if out is not None:
            out[past : past + len(part)] = logits_tv.cpu().numpy()
        following = ids[past + 1 : past + 1 + len(part)]
        next_t = torch.tensor(following, dtype=torch.int32, device=model.device)
        log_probs += log_prob(logits_tv[: len(following)], next_t).tolist()
    return log_probs
