import re
from pathlib import Path

import pytest

from unskew.correct import Correction

TABLE = (Path(__file__).parents[2] / "docs" / "corrections.md").read_text().splitlines()
WRITTEN = sorted({t for line in TABLE[7:-1] for t in re.findall(r"`([^`]+)`", line.split("|")[3])})


def test_the_table_is_read():
    assert len(WRITTEN) > 15


@pytest.mark.parametrize("text", WRITTEN)
def test_every_correction_of_the_table_is_one(text):
    assert str(Correction.parse(text)) == text
