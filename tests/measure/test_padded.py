"""The same sums from numpy, torch and the strict array API; compiled; and over processes."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import array_api_strict
import numpy as np
import pytest
import torch

from unskew._errors import UnskewError
from unskew.measure import MismatchState, compute, token_sums

LIBRARIES = {"numpy": np.asarray, "torch": torch.as_tensor, "strict": array_api_strict.asarray}


def batch(seed=0, rows=12, longest=50, spread=0.1):
    rng = np.random.default_rng(seed)
    shape = (rows, longest)
    rollout = -rng.exponential(0.7, shape)
    old = rollout + rng.normal(0, spread, shape)
    old[0, :4] = rollout[0, :4] + [35.0, 800.0, -800.0, 30.5]
    old[1, :3] = [np.nan, -np.inf, np.inf]
    mask = np.arange(longest) < rng.integers(0, longest + 1, rows)[:, None]
    mask[:2, :5] = True
    mask[-1] = False
    more = {"entropy": rng.exponential(1, shape), "noise_scale": rng.uniform(0, 1, shape), "advantage": rng.normal(size=shape)}
    more["entropy"][2, 3] = np.nan
    return rollout, old, mask, more


def packed(rollout, old, mask, more, **extra):
    """The same tokens through `from_packed`: all T of each row, masked as they are."""
    cu = np.arange(len(rollout) + 1) * rollout.shape[1]
    flat = {name: values.reshape(-1) for name, values in more.items()}
    return MismatchState.from_packed(
        rollout.reshape(-1), old.reshape(-1), mask=mask.reshape(-1), cu_seqlens=cu, probabilities=True, **flat, **extra
    )


def assert_same(a, b, rel=1e-12):
    for f in fields(MismatchState):
        x, y = np.asarray(getattr(a, f.name)), np.asarray(getattr(b, f.name))
        if f.name.startswith("top"):
            x, y = np.sort(x), np.sort(y)
        if x.dtype.kind in "iu" or f.name in ("max_abs", "top", "above", "histogram"):
            assert np.array_equal(x, y), f.name
        else:
            assert np.allclose(x, y, rtol=rel, atol=1e-13 * max(1.0, np.abs(x[np.isfinite(x)]).max(initial=0))), f.name


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("groups", [None, np.arange(12) // 3])
def test_equals_the_packed_scan(library, groups):
    rollout, old, mask, more = batch()
    put = LIBRARIES[library]
    got = MismatchState.from_padded(
        put(rollout), put(old), mask=put(mask), probabilities=True, group_ids=groups, **{k: put(v) for k, v in more.items()}
    )
    expected = packed(rollout, old, mask, more, group_ids=groups)
    assert_same(got, expected)
    with np.errstate(over="ignore"):
        assert compute(got).figures.keys() == compute(expected).figures.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_widened_before_they_are_subtracted(dtype):
    rollout, old, mask, _ = batch(spread=1e-3)
    a, b = (torch.as_tensor(x).to(dtype) for x in (rollout, old))
    got = MismatchState.from_padded(a, b, mask=torch.as_tensor(mask))
    assert_same(got, MismatchState.from_padded(a.double().numpy(), b.double().numpy(), mask=mask))


def test_packed_torch_is_padded_first():
    rollout, old, mask, more = batch()
    cu = torch.arange(13) * rollout.shape[1]
    put = lambda x: torch.as_tensor(x.reshape(-1))  # noqa: E731
    got = MismatchState.from_padded(
        put(rollout), put(old), mask=put(mask), cu_seqlens=cu, probabilities=True, **{k: put(v) for k, v in more.items()}
    )
    assert_same(got, packed(rollout, old, mask, more))


@pytest.mark.filterwarnings("ignore:Dynamo detected")
def test_compiles_as_one_graph():
    rollout, old, mask, more = batch()
    put = torch.as_tensor
    compiled = torch.compile(token_sums, fullgraph=True, backend="aot_eager")
    sums = compiled(put(rollout), put(old), put(mask), probabilities=True, **{k: put(v) for k, v in more.items()})
    assert_same(MismatchState.from_sums(sums), packed(rollout, old, mask, more))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1)])
def test_next_to_nothing(shape):
    for put in LIBRARIES.values():
        state = MismatchState.from_padded(put(np.zeros(shape)), put(np.zeros(shape)), mask=put(np.ones(shape, bool)))
        assert (state.n_tokens, state.max_abs, state.big[0]) == (shape[0] * shape[1], 0.0, 0.0)


def test_shapes_that_do_not_fit():
    with pytest.raises(UnskewError, match="old_logp has shape"):
        token_sums(np.zeros((2, 3)), np.zeros((2, 2)), np.ones((2, 3)))
    with pytest.raises(UnskewError, match="padded"):
        token_sums(np.zeros(3), np.zeros(3), np.ones(3))


RANK = """
import sys
import numpy as np, torch.distributed as dist
from test_padded import batch, packed
rank, world, port, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
rollout, old, mask, more = batch(seed=3, rows=14)
part = slice(rank, None, world) if rank < world - 1 or world == 2 else slice(14, None)
state = packed(rollout[part], old[part], mask[part], {k: v[part] for k, v in more.items()})
state = state.all_reduce()
np.savez(f"{out}/{rank}.npz", **{f: getattr(state, f) for f in state.__dataclass_fields__})
dist.destroy_process_group()
"""


@pytest.mark.parametrize("world", [2, 4])
def test_all_reduced_over_gloo_equals_the_pooled_state(world, tmp_path):
    """Four processes: the last one has no sequence at all."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(world), str(port), str(tmp_path)], cwd=Path(__file__).parent,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    errors = [process.communicate(timeout=240)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * world, errors
    rollout, old, mask, more = batch(seed=3, rows=14)
    if world == 4:
        used = [row for row in range(14) if row % 4 != 3]
        rollout, old, mask, more = rollout[used], old[used], mask[used], {k: v[used] for k, v in more.items()}
    pooled = packed(rollout, old, mask, more)
    for rank in range(world):
        got = np.load(tmp_path / f"{rank}.npz")
        assert_same(MismatchState(**{f.name: got[f.name][()] for f in fields(MismatchState)}), pooled)
