"""What each figure is: formula, how to read it, source."""

from collections.abc import Mapping

__all__ = ["FIGURES"]

FIGURES: Mapping[str, tuple[str, str, str]] = {
    "mean_abs": ("mean |d|, d = old_logp − rollout_logp", "Falls as the policy sharpens; compare logit_noise across models.", ""),
    "max_abs": ("max |d|", "One token can be a bug of its own.", ""),
    "mean_log_ratio": ("mean d", "Positive: the trainer likes the sampled tokens more.", ""),
    "kl_rollout_old_k1": ("mean(−d)", "KL(rollout ‖ old); unbiased, may be negative in a sample.", "Schulman 2020"),
    "kl_rollout_old_k2": ("mean(d²/2)", "Second-order form of either direction.", "Schulman 2020"),
    "kl_rollout_old_k3": (
        "mean(ρ − 1 − d), ρ = e^d",
        "KL(rollout ‖ old), never negative; frameworks' float32 form is noise below 1e-4.",
        "Schulman 2020",
    ),
    "kl_old_rollout_k1": ("mean(ρ d)", "KL(old ‖ rollout) by importance weights.", ""),
    "kl_old_rollout_k3": ("mean(ρ d − (ρ − 1))", "KL(old ‖ rollout), never negative.", ""),
    "chi2_token": ("mean ρ² − 1", "Variance of token weights; fails where k̂ > 0.5.", ""),
    "chi2_sequence": ("mean (∏ρ)² − 1", "Variance of sequence weights; nearly always unusable beyond short responses.", ""),
    "mean_ratio": (
        "mean ρ",
        "1 if the logged numbers are log-probs of a full-support sampler; ≠ 1 refutes that; 1 proves nothing.",
        "",
    ),
    "mean_ratio_z": ("(mean ρ − 1) / its standard error", "Over clusters.", ""),
    "kappa": ("k1 / k3", "≈ 1 honest difference, ≈ −1 a re-scored log, ≫ 1 truncated support, ≈ 0 shift.", ""),
    "calibration": (
        "C = mean(old_logp + H)",
        "0 if the tokens were drawn from what was scored; ≠ 0 at d ≈ 0 is the silent case.",
        "",
    ),
    "calibration_z": ("C / its standard error from per-sequence sums", "Beyond ±4.5 is not chance.", ""),
    "logit_noise": (
        "σ̂ = √(Σd² / Σs²), s² = (1 − p_y)² + Σ_{v≠y} p_v²",
        "Noise on each logit that would make this gap; comparable across models.",
        "",
    ),
    "ess_token": ("(Σρ)² / (n Σρ²)", "Share of the sample size that token weights keep, raw.", "Kong 1992"),
    "ess_sequence": ("(Σw)² / (n Σw²), w = ∏ρ", "Share that sequence products keep; falls with length.", "Kong 1992"),
    "khat_token": (
        "shape of the Pareto tail of ρ",
        "Below min(1 − 1/log10 n, 0.7): means are reliable; ≥ 1: no mean.",
        "Vehtari et al. 2024",
    ),
    "khat_sequence": ("shape of the Pareto tail of ∏ρ", "As khat_token, over sequences.", "Vehtari et al. 2024"),
    "abs_quantile": ("quantile of |d| from a histogram on the bits of float32", "Right within 1/128 of its value.", ""),
    "share_above": (
        "F(τ) = share with max(ρ, 1/ρ) > τ",
        "The tail that means hide; flips of experts show here.",
        "Ma et al. 2025",
    ),
    "share_outside": (
        "share of tokens with ρ outside two bounds (0.8 and 1.2 unless --clip says otherwise)",
        "What a clip would act on before any update; the interval is what histogram bins leave open.",
        "",
    ),
    "advantage_skew": (
        "mean of A·d over tokens with A > 0 (positive) or A < 0 (negative)",
        "How far the mismatch pushes with or against the update; moves before mean KL does.",
        "",
    ),
    "advantage_weight_skew": (
        "mean of A·(ρ − 1), by the sign of A",
        "The first-order bias of an uncorrected policy gradient.",
        "",
    ),
    "correlation": (
        "correlation of mismatch (log π_old/μ) and update (log π_θ/π_old) over tokens",
        "Far from 0: the update is undoing, or amplifying, the mismatch.",
        "",
    ),
    "js": (
        "mean ½(ρ log(2ρ/(1+ρ)) + log(2/(1+ρ)))",
        "Jensen–Shannon divergence of both, each token never negative; ≈ mean d²/8.",
        "Lin 1991",
    ),
    "mean_exp_abs": ("mean e^|d|", "1 + mean |d| to first order; one token of |d| = 10 adds 22026/n.", "NeMo RL"),
    "probability_gap_max": ("max |e^old_logp − e^rollout_logp|", "At most 1; blind to unlikely tokens.", ""),
    "probability_gap": (
        "mean |e^old_logp − e^rollout_logp|",
        "Of sampled tokens; halves with confidence, blind to unlikely tokens: compare logit_noise across models.",
        "",
    ),
    "probability_correlation": (
        "Pearson correlation of e^old_logp and e^rollout_logp over tokens",
        "Near 1 even for large mismatches, since probabilities vary more than they differ.",
        "MiniMax-M1 2025",
    ),
    "sequence_product": ("S = Σ_t d_t of a sequence", "e^S is the sequence weight.", ""),
    "sequence_geometric": ("S / T", "Shrinks as T^−½, so a fixed bound is a test that depends on length.", ""),
    "log_perplexity_gap": ("mean rollout_logp − mean old_logp", "= −mean d.", ""),
}
"""Figure, or its prefix where it comes with a number → (formula, how to read it, source)."""
