"""Settings that a fix touches, in the words of each framework. One table, `settings.toml`; causes name its rows."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files

from unskew._errors import UnskewError

__all__ = ["FRAMEWORKS", "SETTINGS", "snippets"]

Cell = tuple[str, str]

FRAMEWORKS = ("areal", "nemo-rl", "openrlhf", "prime-rl", "roll", "sglang", "skyrl", "slime", "trl", "verl", "vllm")


class _Settings(Mapping[str, Mapping[str, Cell]]):
    """The table, read when it is first looked at."""

    def __getitem__(self, name: str) -> Mapping[str, Cell]:
        return {
            framework: (language, _nested(text) if language == "yaml" else text)
            for framework, cell in _data()[name].items()
            if framework != "says"
            for language, text in cell.items()
        }

    def __iter__(self) -> Iterator[str]:
        return iter(_data())

    def __len__(self) -> int:
        return len(_data())


SETTINGS: Mapping[str, Mapping[str, Cell]] = _Settings()
"""Setting → framework → (language, snippet with the fixing value; `{name}` is a parameter of the finding)."""


def snippets(
    settings: Sequence[str], parameters: Mapping[str, object], *, framework: str | None = None
) -> tuple[tuple[str, str, str], ...]:
    """(framework, language, snippet) of the settings that are known for each framework.

    A snippet whose parameter the finding does not have is left out, and so is one that another repeats with a remark.

    Raises:
        UnskewError: no such framework.

    Example:
        >>> snippets(["rollout.temperature"], {"temperature": 0.7}, framework="trl")
        (('trl', 'python', 'GRPOConfig(temperature=0.7)'),)
    """
    if framework is not None and framework not in FRAMEWORKS:
        raise UnskewError(f"no settings are known for {framework!r}", hint=f"one of {', '.join(FRAMEWORKS)}", exit_code=2)
    out: dict[tuple[str, str, str], str] = {}
    for name in settings:
        for other, (language, template) in SETTINGS.get(name, {}).items():
            if framework in (None, other):
                try:
                    text = template.format_map(dict(parameters))
                except KeyError:
                    continue
                setting = (other, language, text.split("  #")[0])
                out[setting] = max(out.get(setting, ""), text, key=len)
    return tuple((other, language, text) for (other, language, _), text in sorted(out.items()))


def page() -> str:
    """The Markdown table of all settings, `docs/settings.md`."""
    out = [
        "# Settings that fixes touch\n\n"
        "Made from `src/unskew/causes/settings.toml` by "
        '`python -c "from unskew.causes._settings import page; print(page(), end=str())" > docs/settings.md`.\n\n'
        "A fix that `unskew diagnose` prints names rows of this table (`--framework NAME` shows one framework's words).\n"
        "`{name}` is a parameter of the finding. YAML keys are dotted here and nested in the report. Of a\n"
        "framework that is missing no such option is known.\n"
    ]
    for name, row in _data().items():
        out.append(f"\n## {name}\n\n{row['says']}\n")
        cells = [(framework, *next(iter(cell.items()))) for framework, cell in row.items() if framework != "says"]
        if cells:
            out.append("\n| framework | | set |\n| --- | --- | --- |\n")
        for framework, language, text in cells:
            lines = text.replace("{{", "{").replace("}}", "}").replace("|", "\\|").splitlines()
            out.append(f"| {framework} | {language} | {'<br>'.join(f'`{line}`' for line in lines)} |\n")
    return "".join(out)


@cache
def _data() -> dict[str, dict]:
    text = (files("unskew.causes") / "settings.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _nested(dotted: str) -> str:
    """Dotted keys as nested YAML; lines that share a path share its keys.

    Example:
        >>> print(_nested("a.b: 1\\na.c.d: 2"))
        a:
          b: 1
          c:
            d: 2
    """
    out: list[str] = []
    above: list[str] = []
    for line in dotted.splitlines():
        key, value = line.split(":", 1)
        path = key.split(".")
        out += ["  " * k + name + ":" for k, name in enumerate(path) if path[: k + 1] != above[: k + 1]]
        out[-1] += value
        above = path
    return "\n".join(out)
