"""What a correction would do to a trace: figures by hand, calibration that holds on held-out runs, the command."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from unskew._errors import UnskewError
from unskew.cli import main
from unskew.correct import Batch, Correction, batch_of, calibrate, what_if
from unskew.trace import Trace, write


def trace_of(d: list[list[float]], **more) -> Trace:
    rows = [
        {
            "prompt_ids": [1],
            "response_ids": [2] * len(row),
            "rollout_logp": [-3.0] * len(row),
            "old_logp": [-3.0 + x for x in row],
        }
        for row in d
    ]
    for name, values in more.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return Trace.from_rows(rows)


def noisy(seed: int, n: int, sd: float, lengths=(20, 400)) -> Trace:
    rng = np.random.default_rng(seed)
    return trace_of([list(rng.normal(0, sd, rng.integers(*lengths))) for _ in range(n)])


def test_figures_by_hand():
    log = np.log
    trace = trace_of([[log(4.0), 0.0], [log(0.5), log(0.5)]], advantage=[[1.0, 1.0], [-1.0, -1.0]])
    result = what_if(Correction.parse("token-tis(2)"), trace)
    value = {name: figure.value for name, figure in result.figures.items()}
    assert value["tokens_kept"] == 1
    assert value["weight_mean"] == pytest.approx((2 + 1 + 0.5 + 0.5) / 4)
    assert value["weight_max"] == pytest.approx(2)
    assert value["ess"] == pytest.approx(4.0**2 / (4 + 1 + 0.25 + 0.25) / 4)
    assert value["ess_before"] == pytest.approx(6.0**2 / (16 + 1 + 0.5) / 4)
    assert value["bias_token"] == pytest.approx(2 / 4, rel=1e-5)
    assert value["bias_sequence"] == pytest.approx((2 + 3 + 0.25 + 0.25) / 4, rel=1e-5)
    assert result.cut.tolist() == [0]
    masked = what_if(Correction.parse("token-mask(0.6,3)"), trace)
    value = {name: figure.value for name, figure in masked.figures.items()}
    assert (value["tokens_kept"], value["sequences_kept"]) == (0.25, 0.5)
    assert (value["tokens_kept_positive"], value["tokens_kept_negative"]) == (0.5, 0.0)
    assert masked.rejected["token-mask(0.6,3)"].value == 0.75


def test_exact_weights_leave_no_bias():
    trace = noisy(0, 50, 0.05)
    assert what_if(Correction.parse("token-is"), trace).figures["bias_token"].value == pytest.approx(0, abs=1e-6)
    assert what_if(Correction.parse("seq-is"), trace).figures["bias_sequence"].value == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    "method", ["geo-mask", "seq-mask", "token-mask", "seq-mean-k3", "seq-sum-k1", "veto", "token-tis", "kpop", "seq-max-k2"]
)
def test_calibrated_bounds_reject_what_was_asked_for_at_every_length(method):
    def batch(seed: int) -> Batch:
        return batch_of(noisy(seed, 3000, 0.05))

    found = calibrate(Correction.parse(method), batch(1), false_reject=0.05)
    assert len(found.bins) == 6
    assert [b.longest for b in found.bins[:-1]] == [b.shortest - 1 for b in found.bins[1:]]
    assert all(b.false_reject == pytest.approx(0.05, abs=0.06) for b in found.bins)
    other = batch(2)
    for part in found.bins:
        (term,) = part.correction.terms
        values, low, high = term.statistic(other)
        lengths = other.mask.sum(axis=1)
        rows = (lengths >= part.shortest) & (lengths <= (part.longest or 10**9))
        values = np.broadcast_to(values, other.mask.shape)
        inside = (values >= low) & (values <= high)
        if term.method.level == "token":
            share = 1 - inside[rows][other.mask[rows]].mean()
        else:
            share = 1 - inside[rows, 0].mean()
        assert share == pytest.approx(0.05, abs=0.045)
    lengths = other.mask.sum(axis=1)
    kept = other.layout.padded(found.apply(other).keep)
    for part in found.bins:
        rows = (lengths >= part.shortest) & (lengths <= (part.longest or 10**9))
        alone = other.layout.padded(part.correction.apply(other).keep)
        np.testing.assert_array_equal(kept[rows], alone[rows])


def test_a_fixed_geometric_bound_is_a_test_of_length_and_the_calibrated_one_is_not():
    found = calibrate(Correction.parse("geo-mask"), batch_of(noisy(1, 1200, 0.05)), false_reject=0.1)
    widths = [b.correction.terms[0].args[1] - b.correction.terms[0].args[0] for b in found.bins]
    assert all(a > b for a, b in zip(widths, widths[1:], strict=False)), "the spread of a mean falls with length"


@pytest.mark.parametrize(
    ("text", "share", "says"), [("token-is", 0.1, "no bound"), ("geo-mask", 0.0, "between 0 and 1"), ("opsm", 0.1, "no bound")]
)
def test_what_cannot_be_calibrated_says_so(text, share, says):
    with pytest.raises(UnskewError) as error:
        calibrate(Correction.parse(text), batch_of(noisy(0, 5, 0.1)), false_reject=share)
    assert says in f"{error.value} {error.value.hint}"


def test_the_command_answers_for_each_method(tmp_path):
    write(noisy(3, 60, 0.1), tmp_path / "trace.parquet")
    write(noisy(4, 200, 0.02), tmp_path / "clean.parquet")
    arguments = ["correct", str(tmp_path / "trace.parquet"), "--method", "token-tis(2)+veto(1e-4)", "--method", "geo-mask"]
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 0, shown.output
    assert "token-tis(2)+veto(0.0001)" in shown.output
    result = json.loads(
        CliRunner()
        .invoke(main, [*arguments, "--json", "--calibrate", str(tmp_path / "clean.parquet"), "--false-reject", "0.02"])
        .stdout
    )
    assert [len(m["calibrated"]) for m in result["methods"]] == [2, 2]
    assert result["methods"][1]["figures"]["tokens_kept"]["interval"] is not None
    wrong = CliRunner().invoke(main, ["correct", str(tmp_path / "trace.parquet"), "--method", "token-tsi"])
    assert wrong.exit_code == 2
    bare = noisy(3, 5, 0.1)
    write(
        Trace.from_rows([{"response_ids": r, "rollout_logp": [-1.0] * len(r)} for r in bare.rows("response_ids")]),
        tmp_path / "bare.jsonl",
    )
    assert CliRunner().invoke(main, ["correct", str(tmp_path / "bare.jsonl")]).exit_code == 4
