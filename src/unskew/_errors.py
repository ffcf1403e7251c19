"""The one error class and the one gate to optional dependencies."""

import importlib
from types import ModuleType

__all__ = ["UnskewError", "require"]


class UnskewError(Exception):
    """An error a user can act on: what happened, where, and what to do next.

    Args:
        message: what is wrong, with file, row and token where they exist, and expected against got.
        hint: the next step, printed on a line of its own.
        exit_code: what the command line exits with: 2 usage, 3 inconclusive, 4 unreadable or invalid input.

    Example:
        >>> str(UnskewError("t.jsonl row 3: rollout_logp has 4 values, response_ids 5", hint="drop the row"))
        't.jsonl row 3: rollout_logp has 4 values, response_ids 5\\n  next: drop the row'
    """

    def __init__(self, message: str, *, hint: str = "", exit_code: int = 4) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.args[0]}\n  next: {self.hint}" if self.hint else str(self.args[0])


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional dependency, or raise `UnskewError` with the pip line that installs it.

    Example:
        >>> require("json", extra="torch").__name__
        'json'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise
        raise UnskewError(
            f"this needs the package {module!r}, which is not installed",
            hint=f'pip install "unskew[{extra}]"',
            exit_code=2,
        ) from None
