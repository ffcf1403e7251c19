"""Edits of a model's arithmetic, as context managers over its module tree; they work on any architecture and compose."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from unskew._errors import UnskewError
from unskew.score._attention import ATTENTION_EDITS, attention_edits
from unskew.score._edit import Edit
from unskew.score._formats import fake_quantize

__all__ = ["BODY_EDITS", "HEAD_EDITS", "edited", "edited_head", "edited_whole"]

Model = torch.nn.Module
Head = Callable[[torch.Tensor], torch.Tensor]


def _linears(model: Model) -> Iterator[tuple[str, Model]]:
    """Linear layers of the body; their weights are (out, in), those of GPT-2's Conv1D (in, out)."""
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    for name, module in model.named_modules():
        if module is not head and (isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"):
            yield name, module


@contextmanager
def _swapped(parameters: Mapping[Any, torch.Tensor]) -> Iterator[None]:
    """Other values in the place of parameters or buffers for a while."""
    before = {parameter: parameter.data for parameter in parameters}
    try:
        for parameter, values in parameters.items():
            parameter.data = values
        yield
    finally:
        for parameter, values in before.items():
            parameter.data = values


@contextmanager
def _hooked(handles: Sequence[torch.utils.hooks.RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _on_output(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda _module, _inputs, output: change(output)


def _weights(model: Model, format: str) -> Any:
    out = {}
    for _, module in _linears(model):
        weight = module.get_parameter("weight")
        flip = type(module).__name__ == "Conv1D"
        rounded = fake_quantize(weight.data.T if flip else weight.data, format)
        out[weight] = rounded.T if flip else rounded
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and "expert" in name:
            out[parameter] = torch.stack([fake_quantize(part, format) for part in parameter.data])
    return _swapped(out)


def _activations(model: Model, format: str) -> Any:
    def rounded(_module: Model, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (fake_quantize(inputs[0], format), *inputs[1:])

    return _hooked([module.register_forward_pre_hook(rounded) for _, module in _linears(model)])


_ROW_PARALLEL = ("o_proj", "down_proj", "out_proj", "c_proj", "dense_4h_to_h", "fc2", "w2", "wo")


def _split_sums(model: Model, value: str) -> Any:
    """Row-parallel layers as the sum of partial products, each rounded: "parts/dtype"."""
    parts, _, dtype = value.partition("/")

    def reduced(module: Model, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        weight = module.get_parameter("weight").data
        weight = weight.T if type(module).__name__ == "Conv1D" else weight
        total = torch.zeros_like(output)
        for x, w in zip(inputs[0].tensor_split(int(parts), -1), weight.tensor_split(int(parts), -1), strict=True):
            total = fake_quantize(total + fake_quantize(x @ w.T, dtype), dtype)
        bias = getattr(module, "bias", None)
        return total if bias is None else total + bias

    chosen = [module for name, module in _linears(model) if name.rsplit(".", 1)[-1] in _ROW_PARALLEL]
    return _hooked([module.register_forward_hook(reduced) for module in chosen])


def _norms(model: Model) -> list[Model]:
    return [module for module in model.modules() if "norm" in type(module).__name__.lower()]


def _norm_precision(model: Model, dtype: str) -> Any:
    """Norms whose input, scale and output are rounded."""
    before = [
        module.register_forward_pre_hook(lambda _, inputs: (fake_quantize(inputs[0], dtype), *inputs[1:]))
        for module in _norms(model)
    ]
    after = [module.register_forward_hook(_on_output(lambda x: fake_quantize(x, dtype))) for module in _norms(model)]
    return _hooked([*before, *after])


@contextmanager
def _norm_eps(model: Model, eps: float) -> Iterator[None]:
    found = [
        (m, name) for m in _norms(model) for name in ("variance_epsilon", "eps") if isinstance(getattr(m, name, None), float)
    ]
    before = [getattr(module, name) for module, name in found]
    try:
        for module, name in found:
            setattr(module, name, eps)
        yield
    finally:
        for (module, name), value in zip(found, before, strict=True):
            setattr(module, name, value)


def _frequencies(model: Model) -> list[torch.Tensor]:
    found = [b for name, b in model.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    if not found:
        raise UnskewError(f"{type(model).__name__} has no rotary embedding", hint="RoPE causes need one", exit_code=2)
    return found


def _rope_base(model: Model, ratio: float) -> Any:
    """The base of the rotation times a ratio: frequency i of n is base^(−i/n)."""
    return _swapped({f: f * ratio ** -(torch.arange(len(f), device=f.device) / len(f)) for f in _frequencies(model)})


def _rope_linear(model: Model, factor: float) -> Any:
    """Positions divided by a factor."""
    return _swapped({f: f / factor for f in _frequencies(model)})


def _rope_yarn(model: Model, factor: float) -> Any:
    """YaRN with β 32 and 1 over the trained length; its factor on cos and sin is 1 + 0.1 log s (Peng et al., 2023)."""
    length = model.config.get_text_config().max_position_embeddings  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    out = {}
    for f in _frequencies(model):
        turns = length * f / (2 * math.pi)
        keep = ((turns - 1) / 31).clamp(0, 1)
        out[f] = f * keep + f / factor * (1 - keep)
    stack = ExitStack()
    stack.enter_context(_swapped(out))
    stack.enter_context(_rotations(model, lambda x: x * (1 + 0.1 * math.log(factor))))
    return stack


def _rope_precision(model: Model, dtype: str) -> Any:
    return _rotations(model, lambda x: fake_quantize(x, dtype))


def _rotations(model: Model, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """cos and sin of the rotary embedding changed."""
    _frequencies(model)
    found = [m for m in model.modules() if any(n.endswith("inv_freq") for n, _ in m.named_buffers(recurse=False))]
    return _hooked([m.register_forward_hook(lambda _m, _i, output: tuple(change(x) for x in output)) for m in found])


@contextmanager
def _dropout(model: Model, p: float) -> Iterator[None]:
    """Attention probabilities and what dropout layers see, dropped with probability p, from a seed of its own."""
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    handles = [m.register_forward_hook(_on_output(lambda x: torch.nn.functional.dropout(x, p, training=True))) for m in layers]
    with torch.random.fork_rng(devices=[]), attention_edits(model, [Edit("attention-dropout", p)]), _hooked(handles):
        torch.manual_seed(0)
        yield


BODY_EDITS: Mapping[str, Callable[[Model, Any], Any]] = {
    "weights": _weights, "activations": _activations, "split-sums": _split_sums, "norm-precision": _norm_precision,
    "norm-eps": _norm_eps, "rope-base": _rope_base, "rope-linear": _rope_linear, "rope-yarn": _rope_yarn,
    "rope-precision": _rope_precision, "dropout": _dropout,
}  # fmt: skip
"""Edits of what comes before the head, beside `ATTENTION_EDITS`: from the model and the edit's value to a context manager."""


def _head_precision(model: Model, dtype: str) -> Callable[[Head], Head]:
    """Hidden states, the head's weight and the logits rounded."""
    weight = fake_quantize(model.get_output_embeddings().weight.data, dtype)  # pyright: ignore[reportCallIssue]

    def change(head: Head) -> Head:
        def rounded(hidden: torch.Tensor) -> torch.Tensor:
            with _swapped({model.get_output_embeddings().weight: weight}):  # pyright: ignore[reportCallIssue]
                return fake_quantize(head(fake_quantize(hidden, dtype)), dtype)

        return rounded

    return change


def _after(change: Callable[[torch.Tensor, Any], torch.Tensor]) -> Callable[[Model, Any], Callable[[Head], Head]]:
    return lambda _, value: lambda head: lambda hidden: change(head(hidden), value)


HEAD_EDITS: Mapping[str, Callable[[Model, Any], Callable[[Head], Head]]] = {
    "head-precision": _head_precision,
    "logits-precision": _after(fake_quantize),
    "final-softcap": _after(lambda z, cap: torch.tanh(z / cap) * cap),
    "vocab-padding": _after(lambda z, n: torch.cat([z, z.new_zeros(*z.shape[:-1], int(n))], -1)),
}
"""Edits of the head: from the model and the edit's value to a map of heads."""


@contextmanager
def edited(model: Model, edits: Sequence[Edit]) -> Iterator[None]:
    """The model's body under these edits.

    Raises:
        UnskewError: no such edit, or one that this architecture has no place for.
    """
    attention = [edit for edit in edits if edit.name in ATTENTION_EDITS]
    with ExitStack() as stack:
        for edit in edits:
            if edit.name in BODY_EDITS:
                stack.enter_context(BODY_EDITS[edit.name](model, edit.value))
            elif edit.name not in ATTENTION_EDITS and edit.name not in HEAD_EDITS:
                known = sorted([*BODY_EDITS, *ATTENTION_EDITS, *HEAD_EDITS])
                raise UnskewError(f"no edit {edit.name!r}", hint=f"one of {', '.join(known)}", exit_code=2)
        if attention:
            stack.enter_context(attention_edits(model, attention))
        yield


def edited_head(model: Model, head: Head, edits: Sequence[Edit]) -> Head:
    """The head under the edits that are of the head."""
    for edit in edits:
        if edit.name in HEAD_EDITS:
            head = HEAD_EDITS[edit.name](model, edit.value)(head)
    return head


@contextmanager
def edited_whole(model: Model, edits: Sequence[Edit]) -> Iterator[None]:
    """The model's body and head under these edits, as its own `forward` and `generate` see them."""
    embedding = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    with edited(model, edits):
        embedding.forward = edited_head(model, embedding.forward, edits)
        try:
            yield
        finally:
            del embedding.forward
