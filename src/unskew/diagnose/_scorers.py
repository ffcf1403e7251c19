"""Scorers by name, loaded when first asked for."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unskew.score import HFScorer

__all__ = ["load_scorers"]


def load_scorers(model: str, *, older: Sequence[str] = (), adapter: str | None = None) -> "dict[str, Callable[[], HFScorer]]":
    """Loaders of the clean scorer, its 16-bit twins, older checkpoints and the base without its adapter.

    Args:
        model: HF directory or GGUF file of the checkpoint that sampled.
        older: older checkpoints, newest first; named "older:1", "older:2", …
        adapter: PEFT directory that belongs to the checkpoint; "base" is then the model without it, "twice" with it
            merged twice.
    """
    from unskew.score import HFScorer

    def loader(path: str, dtype: str = "float32", adapters: Sequence[str] = ()) -> "Callable[[], HFScorer]":
        return cache(lambda: HFScorer.load(path, dtype=dtype, adapters=adapters))

    once = () if adapter is None else (adapter,)
    scorers = {"": loader(model, adapters=once)}
    for dtype in ("bfloat16", "float16"):
        scorers[dtype] = loader(model, dtype, once)
    for lag, path in enumerate(older, start=1):
        scorers[f"older:{lag}"] = loader(path)
    if adapter is not None:
        scorers["base"] = loader(model)
        scorers["twice"] = loader(model, adapters=(adapter, adapter))
    return scorers
