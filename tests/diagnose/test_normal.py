"""Is a number normal? The floors that ship, and what is answered from them."""

import pytest

from unskew._errors import UnskewError
from unskew.diagnose import KEPT, floors, normal
from unskew.diagnose._floor import ABOVE, FLOORS


def test_floors_are_within_what_the_diagnosis_calls_the_floor():
    assert {f.arch for f in floors()} == {"dense", "moe"}
    assert {f.engine for f in floors()} == {"transformers", "vllm", "llama.cpp"}
    assert {f.dtype for f in floors()} == set(FLOORS)
    for f in floors():
        assert f.figures["logit_noise"] <= ABOVE * FLOORS[f.dtype], f
        assert set(f.figures) == set(KEPT)


def test_each_measured_floor_is_at_the_floor_of_its_model_and_depth():
    for f in floors():
        for figure in ("logit_noise", "mean_abs", "probability_gap", "mean_exp_abs", "kl_rollout_old_k3"):
            answer = normal(figure, f.figures[figure], dtype=f.dtype, arch=f.arch, layers=f.layers, entropy=f.mean_entropy).answer
            assert answer == "at the floor", (figure, f)


def test_more_than_depth_can_explain_is_above():
    for figure, value in (
        ("mean_abs", 0.8),
        ("probability_gap", 0.3),
        ("mean_exp_abs", 3.0),
        ("kl_rollout_old_k1", -0.8),
        ("js", 0.2),
    ):
        assert normal(figure, value, dtype="bf16").answer == "above the floor"
    assert normal("mean_abs", 1e-3, dtype="float32").answer == "above the floor"


def test_what_it_cannot_know_it_does_not_say():
    assert normal("mean_abs", 0.02, dtype="bf16").answer == "cannot tell"
    assert "--layers and --entropy" in normal("mean_abs", 0.02, dtype="bf16").why
    assert normal("mean_abs", 0.02, dtype="bf16", layers=28, entropy=0.4).answer == "at the floor"
    assert normal("mean_abs", 0.2, dtype="bf16", layers=28, entropy=0.4).answer == "above the floor"
    assert normal("max_abs", 5.0, dtype="bf16").answer == "cannot tell"
    assert normal("kl_rollout_old_k1", 1e-6, dtype="bf16").answer == "cannot tell"
    found = normal("mean_abs", 0.01, dtype="bf16", arch="moe", entropy=9.0)
    assert (found.answer, found.floors, found.low) == ("cannot tell", (), None)


@pytest.mark.parametrize(
    ("figure", "value", "dtype"), [("mean_abs", float("nan"), "bf16"), ("mean_abs", 0.1, "fp8"), ("kappa", 1.0, "bf16")]
)
def test_no_floor_is_an_error(figure, value, dtype):
    with pytest.raises(UnskewError):
        normal(figure, value, dtype=dtype)
