"""The 16 fault recipes: the statistic that separates each is reproduced, and the verdict names the recipe's cause."""

import numpy as np
import pytest
import torch
from tiny_lm import LM, V, batch, lsm

from unskew.diagnose import Verdict, diagnose
from unskew.score import HeadStates
from unskew.trace import Trace

P = 8


class TinyScorer:
    """The numpy LM behind the scorer's interface: its logits are the hidden states, its head the identity."""

    tokenizer, eos_ids = None, ()

    def __init__(self, lm: LM, **how):
        self.lm, self.how = lm, how

    @property
    def vocab_size(self):
        return self.lm.logits(np.zeros(2, np.int64)).shape[-1]

    @property
    def tensor_groups(self):
        return ()

    def takes(self, edit):
        return edit == "routing" and bool(self.lm.moe)

    def forward(self, prompts, responses, routed_experts=None, **_):
        logits = []
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            tokens = np.concatenate([prompt, response])
            how = dict(self.how)
            if routed_experts is not None:
                how["route"] = [np.asarray(routed_experts[row])[:, layer] for layer in range(2)]
            logits.append(self.lm.logits(tokens, **how)[len(prompt) - 1 : -1])
        return HeadStates.from_logits(torch.from_numpy(np.concatenate(logits).astype(np.float64)), prompts, responses)


def scorers(lm, **more):
    return {"": lambda: TinyScorer(lm), "bfloat16": lambda: TinyScorer(lm, low=True),
            "float16": lambda: TinyScorer(lm, low=True), **{k: (lambda s=s: s) for k, s in more.items()}}  # fmt: skip


def trace_of(rows, trainer, /, *, prompt=P, **columns):
    """A trace from (tokens, log-probs with NaN on the prompt) and the trainer's log-probs of the full rows."""
    out = []
    for k, ((tokens, logp), old) in enumerate(zip(rows, trainer, strict=True)):
        row = {"id": str(k), "prompt_ids": tokens[:prompt].tolist(), "response_ids": tokens[prompt:].tolist(),
               "rollout_logp": logp[prompt:].tolist(), "old_logp": np.asarray(old)[prompt:].tolist()}  # fmt: skip
        for name, values in columns.items():
            row[name] = values[k]
        out.append(row)
    return Trace.from_rows(out)


def gap(trace):
    return trace.tokens("old_logp").astype(np.float64) - trace.tokens("rollout_logp")


def top(verdict: Verdict):
    assert verdict.verdict == "mismatch", verdict.summary
    return verdict.causes[0]


def sampling(n, **values):
    return [{"temperature": 1.0, **values}] * n


def test_r01_raw_logprobs_at_a_temperature():
    lm = LM()
    rows = batch(lm, T=0.6, lp="raw")
    trace = trace_of(
        rows, [lm.score(t, 0.6) for t, _ in rows], sampling=sampling(24, temperature=0.6, logprobs_mode="raw"),
        trainer=[{"temperature": 0.6, "dtype": "float32"}] * 24, source=[{"dtype": "float32"}] * 24,
    )  # fmt: skip
    cause = top(diagnose(trace, scorers(lm)))
    assert cause.id == "sampling.temperature-raw"
    assert cause.explained > 0.99
    assert np.exp(gap(trace)).mean() > 1.05
    assert diagnose(trace).causes[0].id == "sampling.temperature-raw"


def test_r02_temperature_after_the_softmax():
    lm = LM()
    rows = [(t, logp / 0.6) for t, logp in batch(lm, T=0.6, lp="raw")]
    trace = trace_of(rows, [lm.score(t, 0.6) for t, _ in rows], sampling=sampling(24, temperature=0.6))
    cause = top(diagnose(trace, scorers(lm)))
    assert cause.id == "sampling.temperature-after-softmax"
    assert cause.parameters["temperature"] == pytest.approx(0.6, abs=1e-3)


def test_r03_top_p_renormalised():
    lm = LM()
    rows = batch(lm, top_p=0.8)
    trace = trace_of(rows, [lm.score(t) for t, _ in rows], sampling=sampling(24, top_p=0.8, logprobs_mode="processed"))
    cause = top(diagnose(trace, scorers(lm)))
    assert cause.id == "sampling.top-p"
    assert cause.parameters["top_p"] == pytest.approx(0.8, abs=0.01)
    assert cause.explained > 0.98
    assert gap(trace).max() <= 1e-6
    assert diagnose(trace).causes[0].id == "sampling.top-p"


def test_r04_repetition_penalty_inherited():
    lm = LM()
    rows = batch(lm, rep=1.2)
    trace = trace_of(rows, [lm.score(t) for t, _ in rows])
    cause = top(diagnose(trace, scorers(lm)))
    assert cause.id == "sampling.repetition-penalty"
    assert cause.parameters["repetition_penalty"] == pytest.approx(1.2, abs=0.005)
    fresh = np.array([t[i] not in t[:i] for t, _ in rows for i in range(P, len(t))])
    assert gap(trace)[~fresh].mean() > 0.02 > -0.02 > gap(trace)[fresh].mean()


@pytest.mark.parametrize("with_model", [True, False])
def test_r05_off_by_one(with_model):
    lm = LM()
    rows = batch(lm)
    trace = trace_of(rows, [np.roll(lm.score(t), -1) for t, _ in rows])
    old = trace.tokens("old_logp").copy()
    old[trace.cu_seqlens[1:] - 1] = 0.0
    trace = trace.with_tokens(old_logp=old)
    cause = top(diagnose(trace, scorers(lm) if with_model else None))
    assert cause.id == "record.shift"
    assert cause.side == ("trainer" if with_model else "record")
    assert abs(cause.parameters["lag"]) == 1


def test_r06_retokenised_history():
    lm, rng, rows, trainer = LM(), np.random.default_rng(3), [], []
    for _ in range(24):
        tokens, logp, _ = lm.sample(rng.integers(0, V, P), 40, rng)
        cut = int(rng.integers(14, 24))
        score = lm.score(np.concatenate([tokens[:cut], [47], tokens[cut + 2 :]]))
        rows.append((tokens, logp))
        trainer.append(np.concatenate([score[:cut], [score[cut], 0.0], score[cut + 1 :]]))
    assert top(diagnose(trace_of(rows, trainer))).id == "record.retokenized"


@pytest.mark.parametrize("with_model", [True, False])
def test_r07_synthetic_eos_with_zero(with_model):
    lm = LM()
    rows = [(np.append(t, 2), np.append(logp, 0.0)) for t, logp in batch(lm)]
    trace = trace_of(rows, [lm.score(t) for t, _ in rows])
    cause = top(diagnose(trace, scorers(lm) if with_model else None))
    assert (cause.id, cause.side) == ("record.synthetic-eos", "rollout")
    last = trace.cu_seqlens[1:] - 1
    assert gap(trace)[last].mean() < -1
    assert np.abs(np.delete(gap(trace), last)).max() < 1e-5


def test_r08_lora_never_reaches_the_engine():
    lm = LM()
    for step, scale in enumerate((0, 0.15, 0.3, 0.6)):
        lm.lora, lm.scale = None, 0
        rows = batch(lm, B=10, seed=step + 1)
        base = [lm.score(t) for t, _ in rows]
        lm.with_lora()
        lm.scale = scale
        trace = trace_of(rows, [lm.score(t) for t, _ in rows], ref_logp=[b[P:].tolist() for b in base])
        verdict = diagnose(trace)
        if scale == 0:
            assert verdict.verdict == "clean"
        else:
            assert top(verdict).id == "weights.adapter-missing"
            assert verdict.causes[0].explained > 0.99


def test_r09_stale_prefix_cache():
    old, new, g = LM(), LM(), np.random.default_rng(5)
    for w in new.W:
        for k in w:
            w[k] = w[k] + 0.06 * g.standard_normal(w[k].shape).astype(np.float32)
    rng, rows, hits = np.random.default_rng(1), [], []
    for i in range(20):
        kw = {"kv_from": (8, old)} if i % 2 else {}
        rows.append(new.sample(rng.integers(0, V, P), 30, rng, **kw)[:2])
        hits.append(8 * (i % 2))
    trace = trace_of(rows, [new.score(t) for t, _ in rows], cached_tokens=hits)
    assert top(diagnose(trace)).id == "weights.stale-prefix-cache"
    assert top(diagnose(trace, scorers(new))).id == "weights.stale-prefix-cache"


def test_r10_packing_leak():
    lm, rows, trainer = LM(), [], []
    for pack in range(6):
        members = batch(lm, B=3, seed=pack + 1)
        length = len(members[0][0])
        tokens = np.concatenate([t for t, _ in members])
        score = lm.score(tokens, pos=np.concatenate([np.arange(length)] * 3))
        rows += members
        trainer += [score[k * length : (k + 1) * length] for k in range(3)]
    trace = trace_of(rows, trainer, pack_index=[0, 1, 2] * 6, pack_id=[k // 3 for k in range(18)])
    assert top(diagnose(trace)).id == "position.packing"


@pytest.mark.parametrize("kind", ["abs", "rope"])
def test_r11_left_pad_position_ids(kind):
    lm = LM(pos=kind)
    rows, trainer, pads = batch(lm, B=12, N=24), [], []
    for i, (tokens, _) in enumerate(rows):
        pad = 3 * (i % 4)
        score = np.full(len(tokens), np.nan)
        logits = lm.logits(tokens, pos=np.arange(pad, pad + len(tokens)))
        score[1:] = lsm(logits)[np.arange(len(tokens) - 1), tokens[1:]]
        trainer.append(score)
        pads.append(pad)
    verdict = diagnose(trace_of(rows, trainer, pad_left=pads))
    if kind == "abs":
        assert top(verdict).id == "position.left-pad"
    else:
        assert verdict.verdict == "clean"


def test_r12_bf16_noise_is_clean():
    lm = LM()
    rows = batch(lm, low=True)
    trace = trace_of(
        rows, [lm.score(t) for t, _ in rows], source=[{"dtype": "bfloat16"}] * 24, trainer=[{"dtype": "float32"}] * 24
    )
    for models in (scorers(lm), None):
        verdict = diagnose(trace, models)
        assert verdict.verdict == "clean", verdict.summary
        assert {c.id for c in verdict.causes} <= {"numerics.body", "floor.noise", "estimator.sequence-weight"}
        assert all(c.severity == "info" for c in verdict.causes)


def test_r13_expert_flips():
    lm, rows, routes = LM(moe=8, seed=2), [], []
    for tokens, logp in batch(lm, B=10, N=30, low=True):
        route = []
        lm.logits(tokens, low=True, out_route=route)
        rows.append((tokens, logp))
        routes.append(np.stack(route, axis=1).tolist())
    trace = trace_of(rows, [lm.score(t) for t, _ in rows], routed_experts=routes)
    causes = {c.id: c for c in diagnose(trace, scorers(lm)).causes}
    assert "routing.flips" in causes
    assert causes["routing.flips"].explained > 0.3


def test_r14_dropout_in_the_trainer():
    lm, g = LM(), np.random.default_rng(0)
    rows = batch(lm, B=10)
    a, b = ([lm.score(t, drop=g) for t, _ in rows] for _ in range(2))
    trace = trace_of(rows, a, logp=[s[P:].tolist() for s in b], old_version=[7] * 10, train_version=[7] * 10)
    cause = next(c for c in diagnose(trace, scorers(lm)).causes if c.severity == "error")
    assert (cause.id, cause.side) == ("mode.train", "trainer")


def test_r15_sequence_weights_degenerate_with_length():
    g = np.random.default_rng(0)
    for length, degenerate in ((50, False), (5000, True)):
        rows = []
        for _ in range(100):
            logp = np.log(g.uniform(0.05, 0.9, length))
            rows.append({"response_ids": [1] * length, "rollout_logp": logp.tolist(), "old_logp": (logp + g.normal(0, 0.03, length)).tolist(),
                         "source": {"dtype": "bfloat16"}, "trainer": {"dtype": "bfloat16"}})  # fmt: skip
        verdict = diagnose(Trace.from_rows(rows), max_tokens=10**7)
        assert verdict.verdict == "clean"
        assert ("estimator.sequence-weight" in {c.id for c in verdict.causes}) == degenerate


@pytest.mark.parametrize("with_model", [True, False])
def test_r16_rows_permuted(with_model):
    lm = LM()
    rows = batch(lm, B=16)
    trainer = [lm.score(t) for t, _ in rows]
    trace = trace_of(rows, [trainer[(k + 3) % 16] for k in range(16)])
    cause = top(diagnose(trace, scorers(lm) if with_model else None))
    assert cause.id == "record.row-order"
    assert cause.side == ("trainer" if with_model else "record")
    assert cause.parameters["rows_moved"] == 16
