"""What other projects call their mismatch metrics, and which of our figures each is."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

__all__ = ["Metric", "find_metrics", "metrics"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of another project, from `names.toml`.

    Args:
        framework: who logs it.
        names: every name, written out; a part in <> is filled in by the project.
        ours: our figures that it is, one for all names or one for each; () where none is.
        factor: theirs = factor · ours.
        formula: with d = old_logp − rollout_logp and ρ = e^d.
        over: what its mean runs over: "tokens", "sequences", "samples" (means of token means) or "ranks".
        of: "raw" ratios, or those that a correction left: "truncated", "kept".
        note: what differs, and known defects.
        rule: what its project calls normal.
    """

    framework: str
    names: tuple[str, ...]
    ours: tuple[str, ...]
    factor: float
    formula: str
    over: str
    of: str
    note: str
    rule: str

    def figure(self, name: str) -> str | None:
        """Our figure that this name is, None where none is.

        Example:
            >>> find_metrics("training/rollout_corr/rollout_ppl")[0].figure("training/rollout_corr/rollout_ppl")
            'perplexity_rollout'
        """
        at = next(k for k, known in enumerate(self.names) if _matches(known, name))
        return self.ours[min(at, len(self.ours) - 1)] if self.ours else None

    @property
    def sign(self) -> str:
        """In words: how its sign reads against ours."""
        return "opposite to ours" if self.factor < 0 else "as ours"


@cache
def metrics() -> tuple[Metric, ...]:
    """Every metric that is known, in the order of the data file."""
    given = tomllib.loads((files("unskew.measure") / "names.toml").read_text(encoding="utf-8"))["metric"]
    return tuple(
        Metric(
            framework=m["framework"], names=tuple(name for pattern in m["names"] for name in _expanded(pattern)),
            ours=tuple(m["ours"].split(", ")) if m["ours"] else (), factor=m.get("factor", 1), formula=m["formula"], over=m["over"],
            of=m.get("of", "raw"), note=m.get("note", ""), rule=m.get("rule", ""),
        )
        for m in given
    )  # fmt: skip


def find_metrics(name: str) -> tuple[Metric, ...]:
    """Metrics with this name, as logged or without its first parts; several where projects share it, () of none.

    Example:
        >>> [m.framework for m in find_metrics("kl_sample_train_v1")]
        ['rLLM', 'Tinker']
        >>> find_metrics("training/rollout_corr/k3_kl")[0].ours
        ('kl_rollout_old_k3',)
    """
    return tuple(m for m in metrics() if any(_matches(known, name) for known in m.names))


def _matches(known: str, name: str) -> bool:
    """Equal, or one is the other with more parts before it."""
    pattern = re.sub(r"<[^>]*>", "[^/]+", re.escape(known))
    if re.fullmatch(f"(.*/)?{pattern}", name):
        return True
    return "<" not in known and known.endswith(f"/{name}")


def _expanded(pattern: str) -> Iterator[str]:
    """Every name of "a_{b,c}".

    Example:
        >>> list(_expanded("{a,b}_{c,d}"))
        ['a_c', 'a_d', 'b_c', 'b_d']
    """
    head, brace, rest = pattern.partition("{")
    if not brace:
        yield pattern
        return
    choices, _, tail = rest.partition("}")
    for choice in choices.split(","):
        for end in _expanded(tail):
            yield head + choice + end


def page() -> str:
    """The Markdown table of all metrics, `docs/metrics.md`."""
    head = (
        "# Other projects' metric names\n\n"
        "Made from `src/unskew/measure/names.toml` by "
        '`python -c "from unskew.measure._names import page; print(page(), end=str())" > docs/metrics.md`.\n'
        "`unskew explain NAME` prints one, `unskew explain NAME=VALUE --dtype bf16` says whether the value is normal.\n\n"
        "d = old_logp − rollout_logp, ρ = e^d, S = Σ d of a sequence. Mean over: *tokens* of the batch; *sequences*, one value each;\n"
        "*samples*, the mean of each sequence's token mean; *ranks*, the unweighted mean of each rank's value. Of: raw ratios, or\n"
        "what a correction left of them.\n"
    )
    out, last = [head], ""
    for m in metrics():
        if m.framework != last:
            out.append(
                f"\n## {m.framework}\n\n| name | ours | formula | mean over | of | note |\n| --- | --- | --- | --- | --- | --- |\n"
            )
            last = m.framework
        ours = ", ".join(f"`{name}`" for name in m.ours) or "–"
        note = "; ".join(filter(None, (m.note, f"normal there: {m.rule}" if m.rule else "")))
        sign = "−" if m.factor < 0 else ""
        names = "<br>".join(f"`{name}`" for name in m.names)
        cells = (names, sign + ours, m.formula, m.over, m.of, note)
        out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(out)
