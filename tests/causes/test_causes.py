import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.causes import CAUSES, Cause, Facts
from unskew.causes._base import mean_and_z
from unskew.causes._numerics import round_to
from unskew.causes._record import shift
from unskew.trace import Trace


@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_every_cause_says_what_a_user_needs(cause):
    assert cause.id.count(".") == 1
    assert cause.sides <= {"rollout", "trainer", "record"}
    assert cause.sides
    assert min(len(text) for text in (cause.says, cause.screens_on, cause.refute, cause.remedy)) > 20
    asks = type(cause).propose is not Cause.propose
    reads = type(cause).read is not Cause.read or type(cause).at_floor is not Cause.at_floor
    assert {"reproduced": asks, "matched": True, "lint": reads}[cause.kind]


@settings(deadline=None)
@given(st.floats(-80, 0, width=32), st.sampled_from(["bfloat16", "float16"]))
def test_round_to_is_torchs_rounding(value, dtype):
    torch = pytest.importorskip("torch")
    expected = torch.tensor(value, dtype=torch.float32).to(getattr(torch, dtype)).item()
    assert round_to(np.array([value]), dtype)[0] == expected


def test_round_to_keeps_what_is_not_finite():
    assert np.isnan(round_to(np.array([np.nan]), "bfloat16"))[0]
    assert round_to(np.array([-np.inf]), "bfloat16")[0] == -np.inf


def test_shift_stays_inside_its_sequence():
    out = shift(np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([0, 2, 5]), -1)
    np.testing.assert_array_equal(out, [np.nan, 1.0, np.nan, 3.0, 4.0])


def test_mean_and_z_of_hand_worked_sums():
    values, cu = np.array([1.0, -1.0, 3.0, 1.0]), np.array([0, 2, 3, 4])
    mean, z = mean_and_z(values, cu, 4)
    assert mean == 1.0
    assert z == pytest.approx(4.0 / (np.std([0.0, 3.0, 1.0], ddof=1) * np.sqrt(3)))


def test_mean_and_z_with_an_empty_sequence_at_each_end():
    assert mean_and_z(np.array([2.0, 4.0]), np.array([0, 0, 1, 2, 2]), 2)[0] == 3.0


def rows(**more):
    return [
        {"response_ids": [1, 2, 3, 4], "rollout_logp": [0.0, 0.0, -1.0, -2.0], "old_logp": [-3.0, -2.0, -1.0, -2.0], **more}
        for _ in range(4)
    ]


def test_prompt_in_mask_reads_segments_and_prefixes():
    cause = CAUSES["record.prompt-in-mask"]
    by_segment = Trace.from_rows(rows(segment_ids=[0, 0, 1, 1], mask=[1, 1, 1, 1]))
    (reading,) = cause.read(by_segment, Facts())
    assert reading.drop.tolist() == [True, True, False, False] * 4
    (reading,) = cause.read(Trace.from_rows(rows(prompt_ids=[1, 2])), Facts())
    assert reading.drop.sum() == 8
    assert not list(cause.read(Trace.from_rows(rows(segment_ids=[0, 0, 1, 1])), Facts()))
    assert not list(cause.read(Trace.from_rows(rows(prompt_ids=[9, 9])), Facts()))


def test_filled_logp_reads_what_is_not_finite():
    (reading,) = CAUSES["record.filled-logp"].read(
        Trace.from_rows([{"response_ids": [1, 2, 3], "rollout_logp": [-0.5, float("nan"), -9999.0]}]), Facts()
    )
    assert reading.drop.tolist() == [False, True, True]
    assert "1 × NaN" in reading.says[0]
    assert reading.parameters["share"] == pytest.approx(2 / 3, abs=1e-4)
