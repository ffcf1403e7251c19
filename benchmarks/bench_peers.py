"""unskew beside verl's, TRL's and Liger's own functions and the formulas of AReaL and prime-rl, in one run.

python benchmarks/bench_peers.py [tokens|logits|hidden ...]     (`make bench-peers` installs the peers first)

Each case runs in a process of its own on one thread. Core-milliseconds are CPU time, medians of several calls after a
first one that is not timed; peak memory is what a call needs on top of its inputs.
"""

import argparse
import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROWS, LENGTH = 1024, 8192
VOCAB, LOGIT_ROWS = 151_936, 512
HIDDEN_ROWS, WIDTH = 4096, 256
CASES: dict[str, dict[str, Callable[..., Any]]] = {"tokens": {}, "logits": {}, "hidden": {}}


def case(part: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function that takes a part's inputs as keywords."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES[part][name] = function
        return function

    return register


@case("tokens", "read both arrays once")
def _(rollout, old, mask):
    return float(rollout.sum()), float(old.sum())


def _figures(rollout, old, mask):
    from unskew.measure import MismatchState, compute

    rollout, old, mask = (x.numpy() for x in (rollout, old, mask))
    bounds = np.arange(0, rollout.size + 1, rollout.shape[1])
    return compute(MismatchState.from_packed(rollout.ravel(), old.ravel(), mask=mask.ravel(), cu_seqlens=bounds))


def _weights(rollout, old, mask, method="token-tis(2)"):
    from unskew.correct import Correction

    return Correction.parse(method)(rollout.numpy(), old.numpy(), mask=mask.numpy())


@case("tokens", "unskew: all figures")
def _(**batch):
    return _figures(**batch)


@case("tokens", "unskew: all figures, numpy alone")
def _(**batch):
    sys.modules["numba"] = None  # pyright: ignore[reportArgumentType]
    return _figures(**batch)


@case("tokens", "unskew: weights")
def _(**batch):
    return _weights(**batch)


@case("tokens", "unskew: all figures and weights")
def _(**batch):
    return _figures(**batch), _weights(**batch)


@case("tokens", "verl: off-policy metrics")
def _(rollout, old, mask):
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics

    return compute_offpolicy_metrics(old, rollout, mask)


@case("tokens", "verl: metrics and weights")
def _(rollout, old, mask):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    return compute_rollout_correction_and_rejection_mask(old, rollout, mask, rollout_is="token", rollout_is_threshold=2.0)


@case("tokens", "TRL's formula: weights, mean and max |d|, ratio range")
def _(rollout, old, mask):
    import torch

    d = torch.nan_to_num((old - rollout) * mask, nan=0.0)
    ratio = torch.clamp(torch.exp(d), max=2.0)
    gap, chosen = torch.abs(old - rollout)[mask.bool()], ratio[mask.bool()]
    return gap.mean(), gap.max(), chosen.min(), chosen.mean(), chosen.max(), ratio


@case("tokens", "AReaL's formula: masked weights, KL, kept share")
def _(rollout, old, mask):
    import torch

    d = old.float() - rollout.float()
    d = torch.where(torch.isfinite(d), d, torch.zeros_like(d))
    ratio = torch.exp(d)
    keep = mask.bool() & (ratio <= 2.0)
    weight = torch.where(keep, ratio, torch.zeros_like(ratio))
    count = keep.sum()
    return (weight * keep).sum() / count, (d * keep).sum() / count, 1 - count / mask.sum(), weight


@case("logits", "read the logits once")
def _(logits, ids):
    return logits.view(-1)[: logits.numel()].sum()


@case("logits", "unskew: log-prob, entropy and Σp²")
def _(logits, ids):
    from unskew.score import score_logits

    found = score_logits(logits, ids)
    return found.logp, found.entropy


@case("logits", "log_softmax and gather")
def _(logits, ids):
    return logits.log_softmax(-1).gather(1, ids[:, None])[:, 0], None


@case("logits", "cross_entropy")
def _(logits, ids):
    import torch

    return -torch.nn.functional.cross_entropy(logits, ids, reduction="none"), None


@case("logits", "TRL: selective_log_softmax")
def _(logits, ids):
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax(logits, ids), None


@case("logits", "TRL: selective_log_softmax_and_entropy")
def _(logits, ids):
    from trl.trainer.utils import selective_log_softmax_and_entropy

    return selective_log_softmax_and_entropy(logits, ids)


@case("logits", "verl: logprobs_from_logits")
def _(logits, ids):
    from verl.utils.torch_functional import logprobs_from_logits

    return logprobs_from_logits(logits, ids), None


@case("logits", "verl: logprobs_from_logits_v2 and entropy_from_logits")
def _(logits, ids):
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits_v2

    return logprobs_from_logits_v2(logits, ids), entropy_from_logits(logits)


@case("logits", "prime-rl's formula: log-prob and entropy")
def _(logits, ids):
    import torch

    logp = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return logp, torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)


@case("hidden", "matrix product alone, in chunks")
def _(hidden, head, ids):
    return [float((part @ head.T)[0, 0]) for part in hidden.split(110)]


@case("hidden", "unskew: log-prob, entropy and Σp²")
def _(hidden, head, ids):
    from unskew.score import HeadStates

    states = HeadStates(hidden, lambda x: x @ head.T, [[0]], [ids.numpy()])
    found = states.scores()
    return found.logp, found.entropy


@case("hidden", "log_softmax and gather of all logits")
def _(hidden, head, ids):
    return (hidden @ head.T).log_softmax(-1).gather(1, ids[:, None])[:, 0], None


@case("hidden", "TRL: selective_log_softmax and entropy of all logits")
def _(hidden, head, ids):
    from trl.trainer.utils import selective_log_softmax_and_entropy

    return selective_log_softmax_and_entropy(hidden @ head.T, ids)


@case("hidden", "verl: logprobs_from_logits_v2 of all logits")
def _(hidden, head, ids):
    from verl.utils.torch_functional import logprobs_from_logits_v2

    return logprobs_from_logits_v2(hidden @ head.T, ids), None


@case("hidden", "Liger: chunked selected log-prob")
def _(hidden, head, ids):
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    return LigerFusedLinearPPOBase.chunk_forward(hidden[None], head, ids[None])[0], None


def inputs(part: str, dtype: str) -> dict[str, Any]:
    """Inputs of a part, seed 0; log-ratios of 0.03 nat, logits of standard deviation 3."""
    import torch

    generator, kind = torch.Generator().manual_seed(0), getattr(torch, dtype)
    if part == "tokens":
        rollout = -torch.rand(ROWS, LENGTH, generator=generator).mul_(3)
        old = (rollout + 0.03 * torch.randn(ROWS, LENGTH, generator=generator)).clamp_(max=0.0)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=generator)
        return {"rollout": rollout, "old": old, "mask": (torch.arange(LENGTH) < lengths).float()}
    n = LOGIT_ROWS if part == "logits" else HIDDEN_ROWS
    ids = torch.randint(0, VOCAB, (n,), generator=generator)
    if part == "logits":
        return {"logits": torch.randn(n, VOCAB, generator=generator).mul_(3).to(kind), "ids": ids}
    hidden = torch.randn(n, WIDTH, generator=generator).to(kind)
    return {"hidden": hidden, "head": torch.randn(VOCAB, WIDTH, generator=generator).mul_(3 / WIDTH**0.5).to(kind), "ids": ids}


def truth(given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Log-prob and entropy in float64 of the first 64 rows of the same logits."""
    rows = given["logits"][:64] if "logits" in given else given["hidden"][:64] @ given["head"].T
    logp = rows.double().log_softmax(-1)
    return logp.gather(1, given["ids"][:64, None])[:, 0].numpy(), -(logp.exp() * logp).sum(-1).numpy()


def memory(key: str) -> float:
    """A figure of /proc/self/status in MiB."""
    found = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def run(part: str, name: str, dtype: str, repeats: int) -> None:
    """One case: median core-milliseconds, extra peak MiB, and the largest errors of log-prob and entropy."""
    import torch

    torch.set_num_threads(1)
    given = inputs(part, dtype)
    expected = truth(given) if part != "tokens" else ()
    function = CASES[part][name]
    with torch.no_grad():
        function(**given)
        times = []
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        for _ in range(repeats):
            started = time.process_time()
            result = function(**given)
            times.append(1000 * (time.process_time() - started))
        peak = memory("VmHWM") - before
    errors = []
    if expected and isinstance(result, tuple):
        for ours, exact in zip(result, expected, strict=True):
            rows = None if ours is None else np.asarray(ours.double() if hasattr(ours, "double") else ours)[:64]
            errors.append("–" if rows is None else f"{np.abs(rows - exact).max():.1e}")
    print(f"{np.median(times):.1f}\t{max(peak, 0.0):.0f}\t{'  '.join(errors)}")


def show(part: str, dtype: str, repeats: int) -> None:
    """A part's table: each case beside unskew's."""
    size = {"tokens": f"{ROWS} × {LENGTH}", "logits": f"{LOGIT_ROWS} × {VOCAB} logits",
            "hidden": f"hidden {HIDDEN_ROWS} × {WIDTH}, vocabulary {VOCAB}"}[part]  # fmt: skip
    print(f"\n{part}: {size}, {dtype}")
    print(f"{'':56s} {'core-ms':>9s} {'extra MiB':>9s}  {'error: log-prob, entropy' if part != 'tokens' else ''}")
    call = functools.partial(subprocess.run, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for name in CASES[part]:
        done = call([sys.executable, __file__, "--case", part, name, "--dtype", dtype, "--repeats", str(repeats)])
        if done.returncode:
            print(f"{name:56s}  failed: {done.stderr.strip().splitlines()[-1][:120]}")
            continue
        milliseconds, extra, errors = done.stdout.rstrip("\n").splitlines()[-1].split("\t")
        print(f"{name:56s} {milliseconds:>9s} {extra:>9s}  {errors}", flush=True)


def main() -> None:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--case", nargs=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.case:
        run(*args.case, args.dtype, args.repeats)
        return
    for part in args.parts or CASES:
        for dtype in ("float32",) if part == "tokens" else ("float32", "bfloat16"):
            show(part, dtype, 1 if part == "hidden" else args.repeats)


if __name__ == "__main__":
    main()
