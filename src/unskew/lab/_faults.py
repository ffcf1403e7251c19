"""Traces with planted causes: the same interventions that diagnosis applies, applied to a real rollout."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from unskew._errors import UnskewError
from unskew.causes import CAUSES, Facts, Intervention, Parameter
from unskew.diagnose import ModelCounterfactual, load_scorers, recorded
from unskew.lab._models import model_path
from unskew.lab._task import conversations, prompts, reward
from unskew.score import Edit, HFEngine, HFScorer, Inputs, Sampling
from unskew.trace import Trace

__all__ = ["FAULTS", "LabModel", "Planted", "lab_model", "plant"]

FAULTS: tuple[str, ...] = tuple(cause.id for cause in CAUSES.values() if cause.planted is not None)
"""Ids of the causes that the lab can plant."""


@dataclass(frozen=True, slots=True)
class LabModel:
    """A checkpoint to sample from and what belongs to it: older checkpoints, newest first, and an adapter."""

    name: str
    path: str
    older: tuple[str, ...] = ()
    adapter: str | None = None

    def scorers(self) -> "dict[str, Callable[[], HFScorer]]":
        """Loaders of the scorers that a diagnosis may ask, shared by all diagnoses of this process."""
        return _scorers(self)

    @property
    def facts(self) -> Facts:
        """What is known of its ids."""
        clean = self.scorers()[""]()
        return Facts.of(clean.tokenizer, clean.eos_ids)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the checkpoint."""
        return self.scorers()[""]().tokenizer


@cache
def _scorers(model: LabModel) -> "dict[str, Callable[[], HFScorer]]":
    return load_scorers(model.path, older=model.older, adapter=model.adapter)


def lab_model(name: str) -> LabModel:
    """A packaged model: "dense" with three older checkpoints, "lora" (dense with an adapter), "moe"; or a directory.

    Example:
        >>> lab_model("lora").adapter is not None, len(lab_model("dense").older)
        (True, 3)
    """
    if name in ("dense", "lora"):
        older = tuple(str(model_path(f"dense-old-{k}")) for k in (1, 2, 3)) if name == "dense" else ()
        return LabModel(name, str(model_path("dense")), older, str(model_path("adapter")) if name == "lora" else None)
    return LabModel(name, str(model_path("moe")) if name == "moe" else name)


@dataclass(frozen=True, slots=True, eq=False)
class Planted:
    """A trace, the causes planted in it with their parameters, and the model it was sampled from."""

    trace: Trace
    causes: Mapping[str, Mapping[str, Parameter]]
    model: LabModel


def plant(
    causes: str | Sequence[str] | None, *, seed: int, n: int = 48, max_tokens: int = 80, dtype: str = "float32",
    model: str | LabModel | None = None, parameters: Mapping[str, Mapping[str, Parameter]] | None = None,
    switches: Mapping[str, Any] | None = None,
) -> Planted:  # fmt: skip
    """A trace sampled from a model with planted causes (None: clean).

    The engine is transformers' `generate` with its KV cache; the trainer is the clean scorer in fp32 unless a cause is of
    its side: `old_logp`, `entropy`.

    Args:
        causes: ids of `FAULTS`.
        seed: of prompts, sampling and parameters.
        n: sequences.
        max_tokens: response tokens at most.
        dtype: dtype of the engine, declared as such.
        model: a name or directory that `lab_model` knows; that of the first cause by default.
        parameters: of the causes, instead of drawn ones.
        switches: further settings of the engine, and "trainer.temperature".

    Raises:
        UnskewError: the lab cannot plant this cause.
    """
    names = [causes] if isinstance(causes, str) else list(causes or ())
    for name in names:
        if name not in FAULTS:
            raise UnskewError(f"the lab cannot plant {name!r}", hint=f"one of {', '.join(FAULTS)}", exit_code=2)
    if not isinstance(model, LabModel):
        kinds = [CAUSES[name].plants_in for name in names if CAUSES[name].plants_in != "dense"]
        model = lab_model(model or (kinds or ["dense"])[0])
    given = parameters or {}
    drawn = {name: given.get(name) or CAUSES[name].draw(np.random.default_rng([seed, k])) for k, name in enumerate(names)}
    settings: dict[str, Any] = dict(switches or {})
    for name, values in drawn.items():
        settings |= CAUSES[name].switches(**values)
    temperature = float(settings.pop("trainer.temperature", 1.0))
    sides: dict[str, list[Intervention]] = {"rollout": [], "trainer": [], "record": []}
    for name, values in drawn.items():
        sides[str(CAUSES[name].planted)].append(CAUSES[name].intervene(**values))
    sampling = Sampling(max_tokens=max_tokens, seed=seed, **settings)
    trace, rescored = _sample(model, sides["rollout"], drawn, sampling=sampling, n=n, dtype=dtype)
    changes = [change for side in sides.values() for change in side]
    for change in changes:
        trace = change.sampled(trace, model.facts) if change.sampled else trace
    counterfactual = ModelCounterfactual(trace, model.scorers(), trainer_temperature=temperature)
    scores = counterfactual.scores()
    trace = trace.with_tokens(old_logp=scores.logp, noise_scale=scores.noise_scale)
    if sides["trainer"]:
        trace = trace.with_tokens(old_logp=_kept(counterfactual.predict([sides["trainer"]])[0], scores.logp))
    else:
        trace = trace.with_tokens(entropy=scores.entropy)
    trace = trace.with_rows(
        trainer=[{"framework": "unskew lab", "dtype": "float32", "temperature": temperature, "mode": "eval"}] * len(trace)
    )
    now = trace.tokens("rollout_logp").astype(np.float64)
    now = counterfactual.predict([sides["rollout"]])[0] if rescored else recorded(now, sides["rollout"], trace)
    trace = trace.with_tokens(rollout_logp=_kept(now, trace.tokens("rollout_logp")))
    for change in changes:
        trace = change.rows(trace) if change.rows else trace
    return Planted(trace, drawn, model)


def _kept(values: np.ndarray, before: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), before.astype(np.float64), values)


def _sample(
    model: LabModel, changes: Sequence[Intervention], drawn: Mapping[str, Mapping[str, Any]], *, sampling: Sampling, n: int,
    dtype: str,
) -> tuple[Trace, bool]:  # fmt: skip
    """Rows as sampled, and whether a change cannot be sampled with (positions, another model's K/V, another token's log-prob) but only scored with."""
    talks = any(CAUSES[name].plants_on == "conversations" for name in drawn)
    messages = conversations(n, sampling.seed) if talks else prompts(n, sampling.seed)
    tokenizer = model.tokenizer
    ids = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]
    names = {change.scorer for change in changes if change.scorer}
    run_dtype = next((name for name in names if name in ("bfloat16", "float16")), dtype)
    weights = next((name for name in names if name != run_dtype), "")
    edits: list[Edit] = []
    inputs = Inputs([np.asarray(prompt, np.int64) for prompt in ids], [np.zeros(0, np.int64)] * n)
    empty = Trace.from_rows(
        [{"prompt_ids": p, "response_ids": [0], "rollout_logp": [0.0], "messages": m} for p, m in zip(ids, messages, strict=True)]
    )
    with ExitStack() as stack:
        engine = _engine(model, weights, run_dtype, stack)
        for change in changes:
            if change.cause in _BY_HAND:
                stack.enter_context(_BY_HAND[change.cause](engine.model, drawn[change.cause]))
                continue
            edits += change.edits
            if change.inputs is not None:
                inputs = change.inputs(inputs, empty, model.facts)
        given = [prompt.tolist() for prompt in inputs.prompts]
        rows = HFEngine(engine, path=model.name).sample(given, sampling=sampling, edits=edits)
        routed = engine.routing(given, [row["response_ids"] for row in rows]) if model.name == "moe" else None
    for k, (row, prompt, message) in enumerate(zip(rows, ids, messages, strict=True)):
        text = tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        row |= {"id": f"{sampling.seed}-{k}", "prompt_ids": prompt, "response_text": text, "messages": message,
                "source": {**row["source"], "dtype": dtype}, "reward": reward(message[-1]["content"], text)}  # fmt: skip
        if routed is not None:
            row["routed_experts"] = routed[k].tolist()
    rescored = inputs.positions is not None or inputs.cached is not None or any("likeliest" in c.sampling for c in changes)
    return Trace.from_rows(rows, path=f"<lab seed {sampling.seed}>"), rescored


@cache
def _loaded(path: str, dtype: str, adapters: tuple[str, ...]) -> HFScorer:
    return HFScorer.load(path, dtype=dtype, adapters=adapters)


def _engine(model: LabModel, weights: str, dtype: str, stack: ExitStack) -> HFScorer:
    """The engine's model: the weights that a cause names, in its dtype."""
    once = () if model.adapter is None else (model.adapter,)
    if weights.startswith("older:"):
        return _loaded(model.older[int(weights.removeprefix("older:")) - 1], dtype, ())
    if weights.startswith("of:older:"):
        lag, groups = weights.removeprefix("of:older:").split(":")
        scorer = HFScorer.load(model.path, dtype=dtype, adapters=once)
        stack.enter_context(scorer.with_tensors_of(_loaded(model.older[int(lag) - 1], dtype, ()), groups.split(",")))
        return scorer
    return _loaded(model.path, dtype, {"": once, "base": (), "twice": (*once, *once)}[weights])


@contextmanager
def _low_precision_router(model: torch.nn.Module, parameters: Mapping[str, Any]) -> Iterator[None]:
    """Experts chosen from router inputs with few mantissa bits, gates from the exact logits."""
    bits = int(parameters["mantissa_bits"])

    def choose(
        router: torch.nn.Module, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        logits = output[0]
        low = torch.nn.functional.linear(_round(inputs[0].reshape(-1, inputs[0].shape[-1]), bits), router.get_parameter("weight"))
        chosen = low.topk(output[2].shape[-1], dim=-1).indices
        gates = logits.float().softmax(-1).gather(-1, chosen)
        return logits, (gates / gates.sum(-1, keepdim=True)).to(output[1].dtype), chosen

    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    handles = [router.register_forward_hook(choose) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_BY_HAND: Mapping[str, Callable[[torch.nn.Module, Mapping[str, Any]], AbstractContextManager[None]]] = {
    "routing.flips": _low_precision_router,
}
"""Causes whose fault is not the counterfactual itself but what it replays."""


def _round(values: torch.Tensor, mantissa_bits: int) -> torch.Tensor:
    mantissa, exponent = torch.frexp(values)
    scale = 2.0 ** (mantissa_bits + 1)
    return torch.ldexp((mantissa * scale).round() / scale, exponent)
