import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew._errors import UnskewError
from unskew.trace import SCHEMA, Trace, pack, pad, padding_mask


def test_flat_views_of_two_rows():
    trace = Trace.from_rows(
        [
            {"id": 3, "prompt_ids": [1, 2, 3], "response_ids": [5, 6], "rollout_logp": [-0.5, None], "weight_version": 4},
            {"id": "b", "prompt_ids": [], "response_ids": [7], "rollout_logp": [-1], "weight_version": [9]},
        ]
    )
    assert trace.rows("id") == ["3", "b"]
    assert trace.cu_seqlens.tolist() == [0, 2, 3]
    assert trace.row_of_token.tolist() == [0, 0, 1]
    assert trace.position.tolist() == [0, 1, 0]
    assert trace.tokens("weight_version").tolist() == [4, 4, 9]
    np.testing.assert_array_equal(trace.tokens("rollout_logp"), np.array([-0.5, np.nan, -1], np.float32))
    assert [part.tolist() for part in trace.ragged("prompt_ids")] == [[1, 2, 3], []]


def test_mask_falls_back_row_by_row():
    trace = Trace.from_rows(
        [
            {"response_ids": [1, 2], "mask": [0, 1], "segment_ids": [1, 1]},
            {"response_ids": [3, 4], "segment_ids": [2, 1]},
            {"response_ids": [5]},
        ]
    )
    assert trace.mask.tolist() == [False, True, False, True, True]


def test_null_in_an_integer_list_is_minus_one():
    trace = Trace.from_rows([{"response_ids": [1, None], "rollout_logp": [0, 0]}])
    assert trace.tokens("response_ids").tolist() == [1, -1]


def test_messages_become_json_text_and_settings_are_typed():
    row = {"response_ids": [1], "rollout_logp": [-1.0], "messages": [{"role": "user", "content": "é"}],
           "sampling": {"temperature": 1, "stop": "x", "logit_bias": {"5": -1.5}}}  # fmt: skip
    trace = Trace.from_rows([row, {"response_ids": [2], "rollout_logp": [-1.0]}])
    assert trace.rows("messages") == ['[{"role": "user", "content": "é"}]', None]
    assert trace.setting("sampling", "temperature") == [1.0, None]
    assert trace.setting("sampling", "stop") == [["x"], None]
    assert trace.setting("sampling", "logit_bias") == [[(5, -1.5)], None]


def test_nested_columns_from_arrays():
    trace = Trace.from_rows([{
        "response_ids": np.array([1, 2]), "rollout_logp": np.array([-1, -2], np.float32),
        "topk_ids": np.array([[1, 2], [3, 4]]),
    }])  # fmt: skip
    assert trace.rows("topk_ids") == [[[1, 2], [3, 4]]]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"response_ids": [1], "rollout_logp": "abc"}, "row 0: rollout_logp: expected a list, got str 'abc'"),
        ({"response_ids": "", "rollout_logp": []}, "response_ids: expected a list"),
        ({"response_ids": [1, 2.5]}, "response_ids[1]: expected an integer of 32 bits, got float 2.5"),
        ({"response_ids": [2**31]}, "response_ids[0]: expected an integer of 32 bits, got int 2147483648"),
        ({"response_ids": [float("nan")]}, "response_ids[0]: expected an integer"),
        ({"response_ids": [1], "rollout_logp": [{"logprob": 1}]}, "rollout_logp[0]: expected a number, got dict"),
        ({"response_ids": [1], "rollout_logp": ["-1"]}, "rollout_logp[0]: expected a number, got str '-1'"),
        ({"response_ids": [1], "topk_ids": [1]}, "topk_ids[0]: expected a list, got int 1"),
        ({"response_ids": [1], "sampling": {"temperature": "hot"}}, "sampling.temperature: expected a number, got str 'hot'"),
        ({"response_ids": [1], "sampling": 3}, "sampling: expected an object, got int 3"),
        ({"response_ids": [1], "response_text": "\ud800"}, "response_text: expected text without lone surrogates"),
        ({"response_ids": [1], "reward": [1]}, "reward: expected a number, got list [1]"),
        ({"response_ids": [1], "sampling": {"best_of": 2}}, "unknown columns ['sampling.best_of']"),
    ],
)
def test_a_value_that_does_not_fit_is_named(row, words):
    with pytest.raises(UnskewError) as error:
        Trace.from_rows([row])
    assert words in str(error.value)


def test_mixed_rows_name_the_row_at_fault():
    with pytest.raises(UnskewError, match=r"row 2: rollout_logp: expected a list, got float -1\.0"):
        Trace.from_rows([{"response_ids": [1], "rollout_logp": v} for v in ([-1.0], None, -1.0)])


def test_with_tokens_select_and_wrong_length():
    trace = Trace.from_rows([{"response_ids": [5, 6]}, {"response_ids": []}, {"response_ids": [7]}])
    trace = trace.with_tokens(old_logp=np.array([-1.0, -2.0, -3.0]))
    assert trace.select(np.array([False, True, True])).tokens("old_logp").tolist() == [-3.0]
    assert trace.select([2, 0]).tokens("old_logp").tolist() == [-3.0, -1.0, -2.0]
    with pytest.raises(UnskewError, match=r"expected \(3,\)"):
        trace.with_tokens(old_logp=np.zeros(2))
    broken = Trace.from_rows([{"response_ids": [1, 2], "rollout_logp": [-1.0]}], path="t.jsonl")
    with pytest.raises(UnskewError, match=r"t.jsonl row 0: rollout_logp has 1 values, response_ids 2"):
        broken.tokens("rollout_logp")


def test_schema_is_what_the_docs_say():
    assert len(SCHEMA.names) == len(set(SCHEMA.names))
    assert SCHEMA.field("rollout_logp").type == pa.list_(pa.float32())


def test_padding_hand_worked():
    cu = np.array([0, 2, 2, 5])
    assert padding_mask(cu).tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert pad(np.array([1, 2, 3, 4, 5]), cu, fill=-1).tolist() == [[1, 2, -1], [-1] * 3, [3, 4, 5]]


def test_from_padded_takes_left_padding():
    trace = Trace.from_padded(
        present=np.array([[0, 1, 1], [0, 0, 1]]), response_ids=np.array([[0, 5, 6], [0, 0, 7]]),
        rollout_logp=np.array([[9, -1, -2], [9, 9, -3]]), mask=np.array([[0, 1, 0], [0, 0, 1]]),
        rows={"id": ["a", "b"], "prompt_ids": [[1], [2, 3]]},
    )  # fmt: skip
    assert trace.tokens("rollout_logp").tolist() == [-1, -2, -3]
    assert trace.mask.tolist() == [True, False, True]
    assert trace.rows("prompt_ids") == [[1], [2, 3]]


def test_from_packed_refuses_bounds_that_do_not_fit():
    with pytest.raises(UnskewError, match="rise from 0 to 3"):
        Trace.from_packed(cu_seqlens=np.array([0, 2]), response_ids=np.arange(3))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.booleans())
@settings(deadline=None)
def test_pack_undoes_pad(lengths, as_torch):
    cu = np.concatenate([[0], np.cumsum(lengths)])
    values = np.arange(cu[-1], dtype=np.float32)
    if as_torch:
        torch = pytest.importorskip("torch")
        cu, values = torch.from_numpy(cu), torch.from_numpy(values)
    flat, bounds = pack(pad(values, cu, fill=-7), padding_mask(cu))
    assert flat.tolist() == values.tolist()
    assert bounds.tolist() == cu.tolist()
    assert type(flat) is type(values)
