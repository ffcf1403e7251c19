"""The command line: one file a command, loaded when it is called."""

import difflib
import os
import sys
from importlib import import_module
from typing import Any

import click

from unskew import __version__
from unskew._errors import UnskewError

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "record": "sample from an engine and write a trace",
    "score": "fill a trace with a model's log-probs",
    "lint": "list what is wrong with a trace's rows",
    "import": "convert another dump to a trace",
    "measure": "how far apart, with intervals",
    "correct": "what each correction would do to this trace",
    "diagnose": "name the cause and the fix",
    "report": "write one self-contained HTML page",
    "demo": "record with a planted fault and diagnose it",
    "explain": "what a figure, a key or a cause means",
    "doctor": "what this environment can run",
    "lab": "tiny models to plant faults in",
}

_HELP = """Why a rollout engine and a trainer disagree on log-probabilities, and what to change.

\b
unskew demo                                        see it work, offline
unskew diagnose rollouts.jsonl --model CHECKPOINT  name the cause
unskew measure TRACE                               how far apart, with intervals
unskew report TRACE -o report.html                 one page to share
"""

_EPILOG = """Exit codes: 0 clean, 1 a finding at or above --fail-on, 2 usage, 3 inconclusive, 4 unreadable or invalid
input, 130 interrupted. Results go to stdout, progress to stderr; every command has --json. Every option can be set as
UNSKEW_COMMAND_OPTION in the environment."""


class _Main(click.Group):
    """Finds commands by name, turns errors a user can act on into one message and their exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return import_module(f"unskew.cli._{cmd_name}").command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            ctx.fail(f"no command {args[0]!r}" + (f"; did you mean {near[0]!r}?" if near else "; see unskew --help"))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, and exit with the code that the outcome has."""
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        try:
            return super().main(*args, **kwargs)
        except UnskewError as error:
            click.echo(f"unskew: {error}", err=True)
            sys.exit(error.exit_code)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)

    def invoke(self, ctx: click.Context) -> Any:
        """Invoke, with an interrupt as exit code 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("unskew: interrupted", err=True)
            ctx.exit(130)


@click.command(cls=_Main, help=_HELP, epilog=_EPILOG, context_settings={"auto_envvar_prefix": "UNSKEW", "max_content_width": 100})
@click.version_option(__version__, prog_name="unskew")
def main() -> None:
    """The root of all commands."""
