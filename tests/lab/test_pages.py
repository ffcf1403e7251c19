"""The pages of the causes are those that their classes give today; their figures are pictures and nothing else."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from unskew.causes import CAUSES, Cause
from unskew.lab import _pages
from unskew.lab._faults import FAULTS, plant
from unskew.lab._pages import cause_figure, cause_page, index_page

PAGES = Path(__file__).parents[2] / "docs" / "causes"
FIGURES = sorted((PAGES / "figures").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


def lines(svg):
    """Points of each polyline by its class, (n, 2)."""
    return {
        line.get("class"): np.array([[float(v) for v in point.split(",")] for point in line.get("points", "").split()])
        for line in ElementTree.fromstring(svg).iter(f"{SVG}polyline")
    }


@pytest.mark.parametrize("name", CAUSES)
def test_the_page_is_the_class(name):
    assert (PAGES / f"{name}.md").read_text(encoding="utf-8") == cause_page(CAUSES[name]), "run `unskew lab pages`"


def test_the_index_lists_every_cause_and_links_its_page():
    text = (PAGES / "index.md").read_text(encoding="utf-8")
    assert text == index_page(), "run `unskew lab pages`"
    assert set(re.findall(r"^\| \[([^]]+)\]\(\1\.md\)", text, re.MULTILINE)) == set(CAUSES)


def test_there_is_no_page_or_figure_of_another_cause():
    assert {path.stem for path in PAGES.glob("*.md")} == {*CAUSES, "index"}
    assert {path.stem for path in FIGURES} == set(FAULTS)


def test_links_lead_somewhere():
    headings = re.findall(r"^## (.+)$", (PAGES.parent / "settings.md").read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for name in CAUSES:
        text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        assert set(re.findall(r"\.\./settings\.md#([^)]+)", text)) <= anchors, name
        assert all((PAGES / path).is_file() for path in re.findall(r"\((figures/[^)]+)\)", text)), name


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_a_figure_is_a_small_picture_with_words_and_nothing_that_runs_or_loads(path):
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert len(text.encode()) < 30_000
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {"svg", "title", "style", "defs", "marker", "circle", "rect", "text", "tspan", "line", "polyline"}
    assert not [key for element in root.iter() for key in element.attrib if key.startswith("on") or "href" in key]
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"\b(nan|inf)\b", text)
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert {"rollout log-prob (nat)", "position in the response (token)", "mean |d| (nat)", "clean run, same seed"} <= set(words)
    found = lines(text)
    assert {"hits", "bares", "hit", "bare"} <= set(found)
    assert 300 < len(found["hits"]) <= 400 and 300 < len(found["bares"]) <= 400


def test_a_figure_drawn_again_is_the_same_up_to_rounding():
    name = "record.logp-unit"
    before, now = lines((PAGES / "figures" / f"{name}.svg").read_text(encoding="utf-8")), lines(cause_figure(CAUSES[name]))
    assert before.keys() == now.keys()
    assert np.allclose(before["hits"], now["hits"], atol=2)
    assert np.allclose(before["hit"], now["hit"], atol=5)
    # Log-probs in another unit are a straight line through 0 under a flat clean run.
    x, y = now["hits"].T
    assert abs(np.corrcoef(x, y)[0, 1]) > 0.9999
    assert np.ptp(now["bares"][:, 1]) < 0.5
    assert now["hit"][:, 1].max() < now["bare"][:, 1].min()


def test_tokens_without_a_finite_log_ratio_are_counted(monkeypatch):
    def holed(*causes, **options):
        planted = plant(*causes, **options)
        logp = planted.trace.tokens("rollout_logp").copy()
        logp[:3] = np.nan, -np.inf, -1.0
        return type(planted)(planted.trace.with_tokens(rollout_logp=logp), planted.causes, planted.model)

    _pages._clean.cache_clear()
    clean = _pages._clean(plant(None, seed=0, n=1).model, 0)
    monkeypatch.setattr(_pages, "plant", holed)
    svg = cause_figure(CAUSES["record.logp-unit"])
    assert "2 more tokens have no finite d and are not drawn" in svg
    assert f"{len(clean.d) - 2:,} tokens of the loss" in svg


def test_text_of_a_class_cannot_break_a_page(monkeypatch):
    class Odd(Cause):
        id = "odd.cause"
        says = "a | b *c* `d` <e> _f_ lm_head [g](h)"
        sides = frozenset({"record"})
        screens_on, refute, remedy = "|d|", "no", "none"

    page = cause_page(Odd())
    assert "A | b \\*c\\* \\`d\\` &#60;e&#62; \\_f\\_ lm_head \\[g\\](h)." in page
    assert "The lab cannot plant this cause" in page
    assert "No setting of a framework" in page
    monkeypatch.setattr(_pages, "CAUSES", {"odd.cause": Odd()})
    assert "| [odd.cause](odd.cause.md) | a \\| b \\*c\\*" in index_page()
