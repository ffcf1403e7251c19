"""unskew: why a rollout engine and a trainer disagree on log-probabilities, and what to change."""

__version__ = "0.1.0"
