"""Train the lab models: one script, fixed seeds, minutes on two CPU cores."""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from unskew._errors import UnskewError, require
from unskew.lab._models import VOCAB_SIZE, build_model, build_tokenizer, chat_text
from unskew.lab._task import documents, prompts, reward

__all__ = ["greedy_accuracy", "sample", "token_scores", "train"]

Row = tuple[list[int], list[int]]

SEED = 20260
BATCH_TOKENS = 4096
POOL = 1024
PROMPT_WEIGHT = 0.1
STALE_TARGETS = {"dense-old-1": 0.02, "dense-old-2": 0.05, "dense-old-3": 0.15}
ADAPTER_TARGET = 0.1
STEPS = {"dense": 800, "moe": 1000}
PEAK_LR = {"dense": 3e-3, "moe": 4e-3}


def _encode(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], int]:
    """Ids of a conversation, from BOS to the line end after the last EOS, and where its answer starts."""
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=True, return_dict=False, add_generation_prompt=True)
    return ids, len(prompt)


def _batches(tokenizer: Any, *, seed: int, tilt: float = 0.6) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Whole conversations of like length, right padded: ids `(B, T)` int64 and loss weights `(B, T)` float32.

    One text in eight is in another register and has no BOS, as fragments in a pretraining corpus: BOS is what tells
    the model that a chat begins, so that leaving it out shows.
    """
    chats, fragments = documents(seed, tilt=tilt), documents(seed + 1000, tilt=-tilt)
    rng = np.random.default_rng(seed)
    while True:
        rows = [_encode(tokenizer, next(chats)) for _ in range(7 * POOL // 8)]
        for ids, start in (_encode(tokenizer, next(fragments)) for _ in range(POOL // 8)):
            rows.append((ids[1:], start - 1))
        pool = sorted(rows, key=lambda row: len(row[0]))
        groups, current = [], []
        for row in pool:
            if current and (len(current) + 1) * len(row[0]) > BATCH_TOKENS:
                groups.append(current)
                current = []
            current.append(row)
        for index in rng.permutation(len(groups)):  # the longest, incomplete group is left out
            group = groups[index]
            width = max(len(ids) for ids, _ in group)
            ids = np.zeros((len(group), width), dtype=np.int64)
            weight = np.zeros((len(group), width), dtype=np.float32)
            for row, (tokens, start) in enumerate(group):
                ids[row, : len(tokens)] = tokens
                weight[row, 1 : len(tokens)] = PROMPT_WEIGHT
                weight[row, start : len(tokens) - 1] = 1.0
            yield ids, weight


def _fit(
    model: Any,
    batches: Iterator[tuple[np.ndarray, np.ndarray]],
    *,
    steps: int,
    lr: float,
    after: Callable[[int], bool],
    log: Callable[[str], None],
) -> None:
    """AdamW with warm-up and a linear fall to 2 %; `after(step)` ends the run early by returning True."""
    torch = require("torch", extra="lab")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(1, min(50, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / warm, max(0.02, (steps - k) / (steps - warm)))
    )
    model.train()
    begun = time.perf_counter()
    for step, (ids, weight) in zip(range(1, steps + 1), batches, strict=False):
        tokens, scale = torch.from_numpy(ids), torch.from_numpy(weight)[:, 1:].reshape(-1)
        out = model(input_ids=tokens, use_cache=False, **_router(model))
        loss = torch.nn.functional.cross_entropy(
            out.logits[:, :-1].reshape(-1, VOCAB_SIZE).float(), tokens[:, 1:].reshape(-1), reduction="none"
        )
        loss = (loss * scale).sum() / scale.sum()
        total = loss if getattr(out, "aux_loss", None) is None else loss + model.config.router_aux_loss_coef * out.aux_loss
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            log(f"step {step}/{steps}  loss {loss.item():.4f}  {time.perf_counter() - begun:.0f} s")
        if after(step):
            break
    model.eval()


def _router(model: Any) -> dict[str, bool]:
    return {"output_router_logits": True} if model.config.model_type == "qwen3_moe" else {}


def sample(
    model: Any,
    tokenizer: Any,
    chats: list[list[dict[str, str]]],
    *,
    seed: int = 0,
    greedy: bool = False,
    max_new_tokens: int = 128,
    batch: int = 64,
) -> list[Row]:
    """Answers by `generate` at temperature 1, or greedily: a list of (prompt ids, response ids with EOS)."""
    torch = require("torch", extra="lab")
    torch.manual_seed(seed)
    rows: list[Row] = []
    for first in range(0, len(chats), batch):
        encoded = tokenizer.apply_chat_template(
            chats[first : first + batch],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            out = model.generate(
                **encoded,
                do_sample=not greedy,
                temperature=None if greedy else 1.0,
                top_k=None,
                top_p=None,
                max_new_tokens=max_new_tokens,
            )
        width = encoded["input_ids"].shape[1]
        for ids, kept in zip(out.tolist(), encoded["attention_mask"].tolist(), strict=True):
            response = ids[width:]
            if tokenizer.eos_token_id in response:
                response = response[: response.index(tokenizer.eos_token_id) + 1]
            rows.append((ids[width - sum(kept) : width], response))
    return rows


def greedy_accuracy(model: Any, tokenizer: Any, *, n: int = 200, seed: int = 0) -> float:
    """Mean reward of greedy answers to `n` held-out prompts."""
    chats = prompts(n, seed, split="heldout")
    rows = sample(model, tokenizer, chats, greedy=True)
    texts = [tokenizer.decode(response) for _, response in rows]
    return float(np.mean([reward(chat[-1]["content"], text) for chat, text in zip(chats, texts, strict=True)]))


def token_scores(model: Any, rows: list[Row], *, drop: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Log-prob and entropy of every response token at temperature 1, flat `(N,)` float64, one forward a row.

    Args:
        model: a causal LM.
        rows: (prompt ids, response ids) pairs.
        drop: how many of the first prompt ids to leave out: 1 drops BOS.
    """
    torch = require("torch", extra="lab")
    logp, entropy = [], []
    with torch.no_grad():
        for prompt, response in rows:
            ids = torch.tensor([prompt[drop:] + response])
            start = len(prompt) - drop
            full = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].double(), -1)
            logp.append(full.gather(-1, ids[0, start:, None])[:, 0].numpy())
            entropy.append(-(full.exp() * full).sum(-1).numpy())
    return np.concatenate(logp), np.concatenate(entropy)


def _save(model: Any, tokenizer: Any, path: Path) -> Any:
    """Write bf16 weights and tokenizer; give back the model as a reader in float32 sees it."""
    torch, transformers = require("torch", extra="lab"), require("transformers", extra="lab")
    model.to(torch.bfloat16).save_pretrained(path)
    tokenizer.backend_tokenizer.no_padding()  # a padded call before would be stored
    tokenizer.save_pretrained(path)
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _describe(model: Any, tokenizer: Any, name: str, log: Callable[[str], None]) -> tuple[list[Row], np.ndarray]:
    accuracy = greedy_accuracy(model, tokenizer)
    rows = sample(model, tokenizer, prompts(64, 1, split="heldout"), seed=1)
    logp, entropy = token_scores(model, rows)
    without, _ = token_scores(model, rows, drop=1)
    lengths = [len(response) for _, response in rows]
    log(
        f"{name}: greedy accuracy {accuracy:.3f} (200 held out), entropy {entropy.mean():.3f} nat, "
        f"without BOS mean|d| {np.abs(logp - without).mean():.3f}, "
        f"response length {min(lengths)}-{max(lengths)}, mean {np.mean(lengths):.0f}"
    )
    return rows, logp


def train(out: str | Path, *, kind: str = "all", steps: int | None = None, log: Callable[[str], None] = print) -> None:
    """Train the packaged models from scratch into `out`.

    Args:
        out: the directory to write `dense`, `moe`, `dense-old-1..3` and `adapter` into.
        kind: "dense" (with its older snapshots and adapter), "moe" or "all".
        steps: optimiser steps, instead of the packaged models' own number.
        log: where progress lines go.
    """
    if kind not in ("dense", "moe", "all"):
        raise UnskewError(f"no lab model kind {kind!r}", hint="one of dense, moe, all", exit_code=2)
    out = Path(out)
    tokenizer = build_tokenizer(chat_text(chat) for chat in itertools.islice(documents(SEED), 20000))
    for name in ("dense", "moe") if kind == "all" else (kind,):
        model = build_model(name, tokenizer, seed=SEED)
        total = steps or STEPS[name]
        kept: dict[int, dict[str, Any]] = {}

        def after(step: int, *, model: Any = model, total: int = total, kept: dict[int, dict[str, Any]] = kept) -> bool:
            if total // 3 <= step < total and step % max(1, total // 60) == 0:
                kept[step] = {key: value.detach().bfloat16().clone() for key, value in model.state_dict().items()}
            return False

        _fit(model, _batches(tokenizer, seed=SEED), steps=total, lr=PEAK_LR[name], after=after, log=log)
        model = _save(model, tokenizer, out / name)
        rows, logp = _describe(model, tokenizer, name, log)
        if name == "dense":
            _snapshots(kept, tokenizer, rows, logp, out, log)
            _adapter(model, tokenizer, rows, logp, out, log)


def _snapshots(
    kept: dict[int, dict[str, Any]],
    tokenizer: Any,
    rows: list[Row],
    logp: np.ndarray,
    out: Path,
    log: Callable[[str], None],
) -> None:
    """Of the states kept during training, save the one nearest to each target mean |d|."""
    model = build_model("dense", tokenizer).eval()
    shift = {}
    for step, state in kept.items():
        model.load_state_dict(state)
        shift[step] = float(np.abs(logp - token_scores(model, rows)[0]).mean())
    for name, target in STALE_TARGETS.items():
        step = min(shift, key=lambda k: abs(np.log(shift[k] / target)))
        model.float().load_state_dict(kept[step])
        _save(model, tokenizer, out / name)
        model.float()
        log(f"{name}: step {step}, mean|d| {shift[step]:.4f}")


def _adapter(model: Any, tokenizer: Any, rows: list[Row], logp: np.ndarray, out: Path, log: Callable[[str], None]) -> None:
    """A LoRA adapter that prefers the rarer phrasings, stopped where it moves log-probs by the target."""
    torch, peft = require("torch", extra="lab"), require("peft", extra="lab")
    torch.manual_seed(SEED)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(model, config)
    shift = [0.0]

    def after(step: int) -> bool:
        if step % 3 == 0:
            shift.append(float(np.abs(logp - token_scores(tuned.eval(), rows)[0]).mean()))
            tuned.train()
        return shift[-1] >= ADAPTER_TARGET

    _fit(tuned, _batches(tokenizer, seed=SEED + 1, tilt=-0.6), steps=200, lr=2e-3, after=after, log=log)
    tuned.peft_config["default"].base_model_name_or_path = "dense"
    tuned.save_pretrained(out / "adapter", save_embedding_layers=False)
    (out / "adapter" / "README.md").unlink()  # PEFT's blank model card
    log(f"adapter: mean|d| {shift[-1]:.4f}")
