"""The manifest of a trace directory: what is in it and where it came from."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unskew._errors import UnskewError

__all__ = ["Manifest", "load"]


class Manifest(BaseModel):
    """What a trace directory holds; `manifest.json` on disk.

    `parts` are its Parquet files in order, `created` an ISO time if the writer was given one (absent by default, so that
    the same rows give the same bytes), `provenance` free JSON about the recording.
    """

    model_config = ConfigDict(extra="ignore")

    schema_version: int
    unskew: str
    n_rows: int
    n_tokens: int
    parts: tuple[str, ...]
    created: str | None = None
    provenance: dict[str, Any] = Field(default_factory=dict)


def load(file: Path) -> Manifest:
    """The manifest in a file.

    Raises:
        UnskewError: it is not there or does not parse.
    """
    try:
        return Manifest.model_validate_json(file.read_bytes())
    except OSError as error:
        raise UnskewError(f"{file}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UnskewError(f"{file}: {'.'.join(map(str, first['loc']))} {first['msg']}".replace(":  ", ": ")) from None
