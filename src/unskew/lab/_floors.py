"""How far apart two correct engines are: the gap of clean rollouts, by engine, dtype and model."""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from unskew.diagnose import KEPT, MeasuredFloor
from unskew.lab._models import model_path
from unskew.lab._task import prompts
from unskew.measure import MismatchState, compute
from unskew.score import HFEngine, HFScorer, Sampling, VLLMEngine
from unskew.trace import Trace, read

__all__ = ["measure_floors", "recorded_floors"]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def measure_floors(
    *, models: Sequence[str] = ("dense", "moe"), engines: Sequence[str] | None = None, n: int = 128, seed: int = 0,
    progress: Callable[[str], object] = lambda _: None,
) -> Iterator[MeasuredFloor]:  # fmt: skip
    """Floors of the lab's models: sampled by each engine in each dtype, scored by transformers in fp32 and in the same dtype.

    Args:
        engines: "hf" (generation with its KV cache) and "vllm"; both by default, where vllm is installed.
        n: responses, of at most 80 tokens.
    """
    for model in models:
        path = str(model_path(model))
        tokenizer = HFScorer.load(path).tokenizer
        ids = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in prompts(n, seed=seed)]
        for engine in engines or (("hf", "vllm") if find_spec("vllm") else ("hf",)):
            for dtype in ("float32", "float16", "bfloat16"):
                progress(f"{model}: {engine} in {dtype}")
                make = HFEngine.load if engine == "hf" else VLLMEngine
                rows = make(path, dtype=dtype).sample(ids, sampling=Sampling(max_tokens=80, seed=seed))
                yield from _floors(Trace.from_rows(rows), path, model)


def recorded_floors(trace: str | Path, model: str | Path) -> Iterator[MeasuredFloor]:
    """Floors of a clean recording of any checkpoint: raw log-probs, nothing planted."""
    yield from _floors(read(trace), str(model), Path(model).stem)


def _floors(trace: Trace, path: str, name: str) -> Iterator[MeasuredFloor]:
    source: dict[str, Any] = next((s for s in trace.rows("source") if s), {})
    engine, dtype = str(source.get("engine") or "unknown"), str(source.get("dtype") or "float32")
    for trainer in dict.fromkeys(("float32", dtype)):
        scorer = HFScorer.load(path, dtype=trainer)
        scores = scorer.score(trace)
        state = MismatchState.from_packed(
            trace.tokens("rollout_logp"), scores.logp, mask=trace.mask, cu_seqlens=trace.cu_seqlens, entropy=scores.entropy,
            noise_scale=scores.noise_scale, probabilities=True,
        )  # fmt: skip
        figures = compute(state)
        config = scorer.model.config
        yield MeasuredFloor(
            model=name, arch="moe" if any(getattr(config, key, None) for key in _EXPERTS) else "dense",
            parameters=scorer.model.num_parameters(), layers=config.num_hidden_layers, engine=engine, engine_version=str(source.get("engine_version") or ""),
            dtype=dtype, trainer_dtype=trainer, n_tokens=state.n_tokens, mean_entropy=round(float(np.mean(scores.entropy)), 4),
            figures={key: figures[key].value or 0.0 for key in KEPT},
        )  # fmt: skip
