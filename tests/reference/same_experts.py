"""The reference, following the engine's choice of experts."""

from torch import Tensor

from engine.generate import Model


class SameExperts:
    """Records which experts an engine picks, and picks the same for the reference, if they are all but as good.

    Where two experts' scores differ by less than the rounding of activations, either is right, and what follows
    differs by far more than rounding.

    Attributes:
        model: the engine's model, with recording.
    """

    def __init__(self, model: Model, margin: float = 0.03) -> None:
        self._chosen: list[Tensor] = []
        self._margin = margin
        fetch = model.store.fetch

        def record(layer: int, ids_ta: Tensor) -> Tensor:
            self._chosen.append(ids_ta.cpu().long())
            return fetch(layer, ids_ta)

        model.store.fetch = record  # type: ignore[method-assign]
        self.model = model

    def __call__(self, choice: Tensor, n_active: int) -> Tensor:
        """Ids [T, A] that the engine picked in the next layer; choice [T, E] are the reference's scores."""
        ids = self._chosen.pop(0)
        assert (ids.sort().values.diff() > 0).all(), "an expert was chosen twice"
        least = choice.topk(n_active).values[:, -1:]
        assert (choice.gather(1, ids) >= least - self._margin).all(), "an expert was chosen before a better one"
        return ids
