"""The verdict of a diagnosis and its wire form."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["CauseFinding", "Evidence", "Fix", "Verdict"]

Side = Literal["rollout", "trainer", "record"]
Severity = Literal["info", "warn", "error"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact that speaks for a cause: words, and where it is about tokens, which ones.

    `tokens`: at most eight of {row, id, position, token_id, text, rollout_logp, trainer_logp, log_ratio}, text if known.
    """

    says: str
    tokens: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Fix:
    """What to change: one sentence, and settings by framework as (framework, snippet language, snippet)."""

    says: str
    snippets: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class CauseFinding:
    """One named cause with its share of the gap and how it was found out.

    `explained` is the Shapley share of held-out, noise-weighted d² of `of` (None where the record alone names it).
    """

    id: str
    side: Side
    severity: Severity
    kind: Literal["reproduced", "matched", "lint"]
    says: str
    explained: float | None = None
    of: Literal["gap", "calibration", "rows"] = "gap"
    interval: tuple[float, float] | None = None
    cls: tuple[str, ...] = ()
    parameters: Mapping[str, float | int | str] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
    refute: str = ""
    fix: Fix | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the field `cls` is called `class` on the wire."""
        out = asdict(self)
        out["class"] = list(out.pop("cls"))
        return out


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a diagnosis says: the wire form of `unskew diagnose --json`.

    `summary` is the one sentence for a person in a hurry. `floor`, `gap` and `matters` hold named figures:
    {name: {"value", "interval", "unit", "n"}} beside words under "says".
    """

    verdict: Literal["clean", "mismatch", "inconclusive"]
    summary: str
    causes: tuple[CauseFinding, ...]
    floor: Mapping[str, Any]
    gap: Mapping[str, Any]
    matters: Mapping[str, Any]
    unexplained: float | None
    correction: Mapping[str, Any]
    unchecked: tuple[Mapping[str, str], ...]
    ladder: tuple[Mapping[str, Any], ...]
    n_used: int
    n_excluded: int
    cost: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `diagnose --json`, `schema_version` first."""
        out = {"schema_version": 1, **asdict(self)}
        out["causes"] = [cause.to_dict() for cause in self.causes]
        return out
