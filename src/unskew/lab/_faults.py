"""Traces with a planted cause: the same intervention that diagnosis applies, applied to a real rollout."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from unskew._errors import UnskewError
from unskew.causes import CAUSES, Intervention, Parameter
from unskew.lab._models import model_path
from unskew.lab._task import prompts, reward
from unskew.score import HFEngine, HFScorer, Sampling, SamplingTransform
from unskew.trace import Trace

__all__ = ["FAULTS", "Fault", "plant"]


@dataclass(frozen=True, slots=True)
class Fault:
    """How the lab plants one cause.

    Args:
        cause: its id.
        draw: parameters from a random generator.
        side: whose log-probs are changed where the intervention changes recorded log-probs.
        model: "dense" or "moe".
        sampling: settings of the engine, given the parameters.
        trainer_temperature: what the trainer divides its logits by, given the parameters.
    """

    cause: str
    draw: Callable[[np.random.Generator], dict[str, Parameter]] = lambda _: {}
    side: str = "rollout"
    model: str = "dense"
    sampling: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}
    trainer_temperature: Callable[[Mapping[str, Any]], float] = lambda _: 1.0


def _away_from_one(rng: np.random.Generator) -> float:
    return round(float(rng.choice([rng.uniform(0.55, 0.9), rng.uniform(1.1, 1.4)])), 3)


def _silent(rng: np.random.Generator) -> dict[str, Parameter]:
    if rng.random() < 0.5:
        return {"temperature": round(float(rng.uniform(0.5, 0.8)), 3)}
    return {"top_p": round(float(rng.uniform(0.7, 0.9)), 3)}


FAULTS: Mapping[str, Fault] = {
    fault.cause: fault
    for fault in (
        Fault(
            "sampling.temperature",
            lambda rng: {"temperature": _away_from_one(rng)},
            sampling=lambda p: {"temperature": p["temperature"], "logprobs_mode": "processed"},
        ),
        Fault(
            "sampling.temperature-raw",
            lambda rng: {"temperature": _away_from_one(rng)},
            sampling=lambda p: {"temperature": p["temperature"], "logprobs_mode": "raw"},
            trainer_temperature=lambda p: p["temperature"],
        ),
        Fault(
            "sampling.top-p",
            lambda rng: {"top_p": round(float(rng.uniform(0.75, 0.97)), 3)},
            sampling=lambda p: {"top_p": p["top_p"], "logprobs_mode": "processed"},
        ),
        Fault(
            "sampling.top-k",
            lambda rng: {"top_k": int(rng.integers(2, 8))},
            sampling=lambda p: {"top_k": p["top_k"], "logprobs_mode": "processed"},
        ),
        Fault(
            "sampling.repetition-penalty",
            lambda rng: {"repetition_penalty": round(float(rng.uniform(1.05, 1.3)), 3)},
            sampling=lambda p: {"repetition_penalty": p["repetition_penalty"], "logprobs_mode": "processed"},
        ),
        Fault("sampling.silent", _silent, sampling=lambda p: {**p, "logprobs_mode": "raw"}),
        Fault("record.shift", lambda rng: {"lag": int(rng.choice([-1, 1]))}, side="trainer"),
        Fault("record.synthetic-eos", lambda _: {"value": 0.0}),
        Fault("record.filled-logp", lambda rng: {"value": 0.0, "every": int(rng.integers(5, 25))}),
        Fault("record.prompt-in-mask"),
        Fault("record.row-order", lambda rng: {"step": int(rng.integers(1, 6))}, side="trainer"),
        Fault("template.bos"),
        Fault("weights.stale", lambda rng: {"lag": int(rng.integers(1, 4))}),
        Fault("weights.tied-head", lambda rng: {"lag": int(rng.integers(1, 4))}),
        Fault("numerics.body", lambda _: {"dtype": "bfloat16"}),
        Fault("numerics.logp-storage", lambda rng: {"dtype": str(rng.choice(["bfloat16", "float16"]))}),
        Fault("routing.flips", lambda rng: {"mantissa_bits": int(rng.integers(2, 5))}, model="moe"),
    )
}
"""The causes the lab can plant."""


def plant(
    cause: str | None, *, seed: int, n: int = 48, max_tokens: int = 80, dtype: str = "float32", model: str | None = None
) -> tuple[Trace, dict[str, Parameter]]:
    """A trace sampled from a lab model with one planted cause (None: clean), and the drawn parameters.

    The trainer is the clean scorer in fp32: `old_logp`, `entropy`. The engine samples with its KV cache.

    Args:
        cause: an id of `FAULTS`, or None.
        seed: of prompts, sampling and parameters.
        n: sequences.
        max_tokens: response tokens at most.
        dtype: dtype of the engine, declared as such.
        model: "dense" or "moe"; the fault's own by default.

    Raises:
        UnskewError: the lab cannot plant this cause.
    """
    if cause is not None and cause not in FAULTS:
        raise UnskewError(f"the lab cannot plant {cause!r}", hint=f"one of {', '.join(FAULTS)}", exit_code=2)
    fault = FAULTS[cause] if cause else Fault("floor.noise")
    parameters = fault.draw(np.random.default_rng(seed))
    change = CAUSES[cause].intervene(**parameters) if cause and cause != "sampling.silent" else Intervention("floor.noise")
    model = model or fault.model
    trace = _sample(fault, parameters, change, seed=seed, n=n, max_tokens=max_tokens, dtype=dtype, model=model)
    if cause == "record.synthetic-eos":
        trace = _append_eos(trace, scorer(model).tokenizer.eos_token_id)
    temperature = fault.trainer_temperature(parameters)
    scores = scorer(model).score(trace, SamplingTransform(temperature=temperature))
    trace = trace.with_tokens(old_logp=scores.logp, entropy=scores.entropy, noise_scale=scores.noise_scale)
    trace = trace.with_rows(
        trainer=[{"framework": "unskew lab", "dtype": "float32", "temperature": temperature, "mode": "eval"}] * n
    )
    if change.logp is not None:
        column = "old_logp" if fault.side == "trainer" else "rollout_logp"
        before = trace.tokens(column).astype(np.float64)
        after = change.logp(before, trace)
        trace = trace.with_tokens(**{column: np.where(np.isnan(after), before, after)})
    return (change.rows(trace) if change.rows else trace), parameters


def _sample(
    fault: Fault,
    parameters: Mapping[str, Any],
    change: Intervention,
    *,
    seed: int,
    n: int,
    max_tokens: int,
    dtype: str,
    model: str,
) -> Trace:
    sampling = Sampling(max_tokens=max_tokens, seed=seed, **fault.sampling(parameters))
    messages = prompts(n, seed=seed)
    tokenizer = scorer(model).tokenizer
    ids = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]
    run_dtype = change.scorer if change.scorer in ("bfloat16", "float16") else dtype
    inner = HFScorer.load(model_path(model), dtype=run_dtype)
    if "older:" in change.scorer:
        old = HFScorer.load(model_path(f"dense-old-{parameters['lag']}"), dtype=run_dtype)
        if change.scorer.startswith("of:"):
            inner.model.lm_head.weight = torch.nn.Parameter(old.model.lm_head.weight.detach().clone())
        else:
            inner = old
    engine = HFEngine(inner, path=model)
    given = [prompt[1:] for prompt in ids] if fault.cause == "template.bos" else ids
    with _low_precision_router(inner.model, int(parameters.get("mantissa_bits", 0))):
        rows = engine.sample(given, sampling=sampling)
        routed = inner.routing(given, [row["response_ids"] for row in rows]) if model == "moe" else None
    for k, (row, prompt, message) in enumerate(zip(rows, ids, messages, strict=True)):
        text = tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        row |= {"id": f"{seed}-{k}", "prompt_ids": prompt, "response_text": text, "source": {**row["source"], "dtype": dtype},
                "reward": reward(message[-1]["content"], text)}  # fmt: skip
        if routed is not None:
            row["routed_experts"] = routed[k].tolist()
    return Trace.from_rows(rows, path=f"<lab seed {seed}>")


@cache
def scorer(model: str) -> HFScorer:
    """The clean fp32 scorer of a lab model."""
    return HFScorer.load(str(model_path(model)))


def _append_eos(trace: Trace, eos_id: int) -> Trace:
    """Rows with one EOS more that nobody sampled; its log-prob is set by the intervention."""
    rows = trace.table.to_pylist()
    for row in rows:
        row["response_ids"] = row["response_ids"] + [eos_id]
        row["rollout_logp"] = row["rollout_logp"] + [0.0]
    return replace(trace, table=Trace.from_rows(rows).table)


@contextmanager
def _low_precision_router(model: torch.nn.Module, mantissa_bits: int) -> Iterator[None]:
    """Experts chosen from router inputs with few mantissa bits, gates from the exact logits; 0 bits changes nothing."""
    handles = []

    def choose(
        router: torch.nn.Module, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        logits = output[0]
        low = torch.nn.functional.linear(
            _round(inputs[0].reshape(-1, inputs[0].shape[-1]), mantissa_bits), router.get_parameter("weight")
        )
        chosen = low.topk(output[2].shape[-1], dim=-1).indices
        gates = logits.float().softmax(-1).gather(-1, chosen)
        return logits, (gates / gates.sum(-1, keepdim=True)).to(output[1].dtype), chosen

    if mantissa_bits:
        routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        handles = [router.register_forward_hook(choose) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _round(values: torch.Tensor, mantissa_bits: int) -> torch.Tensor:
    mantissa, exponent = torch.frexp(values)
    scale = 2.0 ** (mantissa_bits + 1)
    return torch.ldexp((mantissa * scale).round() / scale, exponent)
