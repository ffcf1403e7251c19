"""Scoring against plain full-logits log-softmax on tiny random models of several architectures."""

import numpy as np
import pytest
import torch
import transformers

from unskew._errors import UnskewError
from unskew.score import HFScorer, SamplingTransform

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip


def model_of(kind):
    torch.manual_seed(0)
    config = {
        "llama": lambda: transformers.LlamaConfig(**SMALL),
        "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True),
        "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
            **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
        "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
        "gemma2": lambda: transformers.Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=5.0, query_pre_attn_scalar=8),
        "granite": lambda: transformers.GraniteConfig(**SMALL, logits_scaling=3.0),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    }[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    return model


def rows(seed=0, n=5):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 97, rng.integers(1, 9)) for _ in range(n)], [
        rng.integers(0, 97, rng.integers(1, 20)) for _ in range(n)
    ]


def plain(model, prompt, response):
    with torch.no_grad():
        return model(torch.tensor(np.concatenate([prompt, response]))[None]).logits[0, len(prompt) - 1 : -1].double()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe", "mixtral", "gemma2", "granite", "gpt2"])
def test_equals_the_full_logits_row_by_row(kind):
    model = model_of(kind).eval()
    prompts, responses = rows()
    scores = HFScorer(model, max_tokens=64).forward(prompts, responses).scores()
    logits = torch.cat([plain(model, p, r) for p, r in zip(prompts, responses, strict=True)])
    full = logits.log_softmax(-1)
    ids = torch.tensor(np.concatenate(responses))[:, None]
    np.testing.assert_allclose(scores.logp, full.gather(1, ids)[:, 0].numpy(), atol=2e-5)
    p = full.exp()
    np.testing.assert_allclose(scores.entropy, -(p * full).sum(1).numpy(), atol=2e-5)
    p_y = p.gather(1, ids)[:, 0]
    np.testing.assert_allclose(scores.noise_scale, ((1 - p_y) ** 2 + (p**2).sum(1) - p_y**2).sqrt().numpy(), atol=2e-5)


def brute(transform, logits, prompt, output):
    """Log-probs by the definition, one position, in numpy float64."""
    z = logits.astype(np.float64).copy()
    for token, bias in transform.logit_bias:
        z[token] += bias
    seen = np.unique(np.concatenate([prompt, output]).astype(int))
    z[seen] = np.where(z[seen] > 0, z[seen] / transform.repetition_penalty, z[seen] * transform.repetition_penalty)
    for token in set(output.tolist()):
        z[token] -= transform.frequency_penalty * (output == token).sum() + transform.presence_penalty
    z = z / transform.temperature
    p = np.exp(z - z.max())
    z[p < transform.min_p * p.max()] = -np.inf
    if transform.top_k:
        z[z < np.sort(z)[-transform.top_k]] = -np.inf
    if transform.top_p < 1:
        order = np.argsort(-z, kind="stable")
        p = np.exp(z[order] - z.max())
        p /= p.sum()
        z[order[np.cumsum(p) - p >= transform.top_p]] = -np.inf
    with np.errstate(divide="ignore"):
        return z - z.max() - np.log(np.exp(z - z.max()).sum())


TRANSFORMS = [
    SamplingTransform(temperature=0.6), SamplingTransform(top_k=5), SamplingTransform(top_p=0.7), SamplingTransform(min_p=0.2),
    SamplingTransform(temperature=1.4, top_p=0.8, top_k=20), SamplingTransform(temperature=0.8, min_p=0.05, top_p=0.9),
    SamplingTransform(repetition_penalty=1.3), SamplingTransform(presence_penalty=0.5, frequency_penalty=0.3),
    SamplingTransform(repetition_penalty=0.8, temperature=0.7, top_p=0.9), SamplingTransform(logit_bias={3: 2.0, 7: -1.0}),
]  # fmt: skip


def test_transforms_equal_their_definition():
    model = model_of("llama").eval()
    prompts, responses = rows(1)
    states = HFScorer(model).forward(prompts, responses)
    found = states.logp(TRANSFORMS)
    for k, transform in enumerate(TRANSFORMS):
        expected, entropy = [], []
        for prompt, response in zip(prompts, responses, strict=True):
            logits = plain(model, prompt, response).numpy()
            for t, token in enumerate(response):
                logp = brute(transform, logits[t], prompt, response[:t])
                expected.append(logp[token])
                entropy.append(-(np.exp(logp) * np.where(np.isfinite(logp), logp, 0)).sum())
        np.testing.assert_allclose(found[k], expected, atol=5e-5)
        np.testing.assert_allclose(states.scores(transform).entropy, entropy, atol=5e-5)


def test_a_subset_of_tokens_gives_the_same_numbers():
    prompts, responses = rows(2)
    states = HFScorer(model_of("llama")).forward(prompts, responses)
    some = np.array([0, 3, 4, 11])
    part = states.logp(TRANSFORMS, tokens=some)
    np.testing.assert_allclose(part[:, some], states.logp(TRANSFORMS)[:, some], atol=1e-12)
    assert np.isnan(np.delete(part, some, axis=1)).all()


def test_batching_and_chunking_change_nothing(monkeypatch):
    model = model_of("qwen3")
    prompts, responses = rows(3, 9)
    one = HFScorer(model, max_tokens=1).forward(prompts, responses).scores().logp
    many = HFScorer(model).forward(prompts, responses).scores().logp
    monkeypatch.setattr("unskew.score._head._CHUNK_ELEMENTS", 97 * 2)
    chunked = HFScorer(model).forward(prompts, responses).scores().logp
    np.testing.assert_allclose(many, one, atol=1e-5)
    np.testing.assert_allclose(chunked, many, atol=1e-12)


def test_routing_replay_of_its_own_choices_changes_nothing_and_of_others_does():
    scorer = HFScorer(model_of("qwen3-moe"))
    prompts, responses = rows(4)
    own = scorer.routing(prompts, responses)
    free = scorer.forward(prompts, responses).scores().logp
    same = scorer.forward(prompts, responses, routed_experts=own).scores().logp
    other = scorer.forward(prompts, responses, routed_experts=[(ids + 1) % 4 for ids in own]).scores().logp
    np.testing.assert_allclose(same, free, atol=1e-5)
    assert np.abs(other - free).mean() > 1e-2


def test_an_empty_prompt_leaves_its_first_token_without_a_number():
    logp = HFScorer(model_of("llama")).forward([[], [1]], [[5, 6], [7]]).scores().logp
    assert np.isnan(logp[0])
    assert np.isfinite(logp[1:]).all()


def test_an_id_outside_the_vocabulary_is_named():
    with pytest.raises(UnskewError, match=r"row 1 response token 1: id 97 is outside the model's vocabulary of 97"):
        HFScorer(model_of("llama")).forward([[1], [2]], [[5], [6, 97]])


def test_what_is_not_a_checkpoint_is_said(tmp_path):
    with pytest.raises(UnskewError, match=r"no config\.json"):
        HFScorer.load(tmp_path)
    with pytest.raises(UnskewError, match="no such checkpoint"):
        HFScorer.load(tmp_path / "absent")


@pytest.mark.parametrize("bad", [{"temperature": 0}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"repetition_penalty": 0}])
def test_settings_outside_their_range_are_refused(bad):
    with pytest.raises((ValueError, UnskewError)):
        SamplingTransform(**bad)
