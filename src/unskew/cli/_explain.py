"""`unskew explain`: what a figure, a key of the trace or a cause means."""

from typing import Any

import click

from unskew._errors import UnskewError
from unskew.cli._output import emit, json_option


@click.command()
@click.argument("topic", required=False)
@json_option
def command(topic: str | None, as_json: bool) -> None:
    """What a figure, a key of the trace or a cause means; without a topic, the list of topics.

    \b
    unskew explain kappa
    unskew explain sampling.temperature
    unskew explain trace
    """
    from unskew.causes import CAUSES
    from unskew.correct import METHODS
    from unskew.measure._explain import FIGURES

    figure = next((name for name in FIGURES if topic and (topic == name or topic.startswith(f"{name}_"))), None)
    result: dict[str, Any]
    if topic is None:
        result = {"topics": ["trace", "exit-codes", "corrections"], "figures": list(FIGURES), "causes": list(CAUSES)}
    elif topic == "trace":
        from unskew.trace import SCHEMA, TOKEN_COLUMNS

        result = {f.name: f"{f.type}{', one value a response token' if f.name in TOKEN_COLUMNS else ''}" for f in SCHEMA}
    elif topic == "corrections":
        result = {method.signature(): f"{method.says} ({method.source})" for method in METHODS.values()}
    elif topic == "exit-codes":
        result = {"0": "clean", "1": "a finding at or above --fail-on", "2": "usage", "3": "inconclusive",
                  "4": "unreadable or invalid input", "130": "interrupted"}  # fmt: skip
    elif topic in METHODS:
        method = METHODS[topic]
        result = {"written": method.signature(), "says": method.says, "decides for": method.level, "source": method.source}
    elif topic in CAUSES:
        cause = CAUSES[topic]
        result = {"says": cause.says, "sides": ", ".join(sorted(cause.sides)), "found by": cause.screens_on,
                  "refuted if": cause.refute, "fix": cause.remedy, "settings": ", ".join(cause.settings)}  # fmt: skip
    elif figure is not None:
        formula, reading, source = FIGURES[figure]
        result = {"formula": formula, "reading": reading, "source": source or "this project's conventions"}
    else:
        raise UnskewError(f"nothing is known about {topic!r}", hint="unskew explain lists the topics", exit_code=2)

    def human(console: Any) -> None:
        for name, words in result.items():
            text = ", ".join(words) if isinstance(words, list) else words
            console.print(f"[bold]{name}[/]: {text.replace('[', chr(92) + '[')}")

    emit({"schema_version": 1, "topic": topic, **result}, as_json=as_json, human=human)
