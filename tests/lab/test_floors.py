"""Floors measured again, small: the same order as those that ship."""

import pytest

from unskew.diagnose import floors
from unskew.lab import model_path
from unskew.lab._floors import measure_floors, recorded_floors


def shipped(found):
    keys = ("model", "engine", "dtype", "trainer_dtype")
    return next(f for f in floors() if all(getattr(f, k) == getattr(found, k) for k in keys))


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_transformers_against_itself(model):
    measured = list(measure_floors(models=[model], engines=["hf"], n=12, seed=5))
    assert [(f.dtype, f.trainer_dtype) for f in measured] == [
        ("float32", "float32"), ("float16", "float32"), ("float16", "float16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"),
    ]  # fmt: skip
    for f in measured:
        assert 0.25 < f.figures["logit_noise"] / shipped(f).figures["logit_noise"] < 4, f
        assert (f.arch, f.layers, f.parameters) == (shipped(f).arch, shipped(f).layers, shipped(f).parameters)


def test_a_recording(tmp_path):
    from pathlib import Path

    trace = Path(__file__).parents[1] / "data" / "vllm" / "dense-bf16.parquet"
    found = list(recorded_floors(trace, model_path("dense")))
    assert [(f.engine, f.dtype, f.trainer_dtype) for f in found] == [
        ("vllm", "bfloat16", "float32"),
        ("vllm", "bfloat16", "bfloat16"),
    ]
    assert all(0.25 < f.figures["logit_noise"] / shipped(f).figures["logit_noise"] < 4 for f in found)
