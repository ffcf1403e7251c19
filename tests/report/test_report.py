"""The page in a real browser: no network, no script, verdict first; and what hostile text can do to it (nothing)."""

import json
import re

import numpy as np
import pytest
from playwright.sync_api import sync_playwright

from unskew.lab import recorded_path
from unskew.measure import measure
from unskew.report import render
from unskew.report._svg import ticks
from unskew.trace import Trace, read


@pytest.fixture(scope="module")
def page_html():
    trace = read(recorded_path())
    verdict = json.loads(recorded_path("verdict.json").read_text())
    return render(trace, measure(trace).to_dict(), verdict, title="a run")


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.mark.browser
@pytest.mark.parametrize("javascript", [True, False])
def test_opens_from_a_file_without_network_or_script(browser, page_html, tmp_path, javascript):
    path = tmp_path / "report.html"
    path.write_text(page_html)
    context = browser.new_context(java_script_enabled=javascript, offline=True, viewport={"width": 1200, "height": 800})
    page = context.new_page()
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(path.as_uri())
    assert requests == [path.as_uri()]
    assert errors == []
    assert page.locator("#verdict b").inner_text() == "✕ Mismatch"
    assert page.locator("#verdict").bounding_box()["y"] < 200
    assert page.locator(".numbers li").count() <= 7
    assert "sampling.temperature" in page.locator("#causes article h3").first.inner_text()
    assert page.locator("#plots svg").count() == 4
    assert page.locator("#worst .here").count() == 8
    context.close()


@pytest.mark.browser
def test_fits_a_narrow_screen_and_prints(browser, page_html, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page_html)
    page = browser.new_page(viewport={"width": 380, "height": 800}, color_scheme="dark")
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    assert len(page.pdf()) > 10_000
    page.close()


def test_size_bytes_and_embedded_data(page_html):
    assert len(page_html.encode()) < 1_000_000
    trace = read(recorded_path())
    verdict = json.loads(recorded_path("verdict.json").read_text())
    assert render(trace, measure(trace).to_dict(), verdict, title="a run") == page_html
    data = json.loads(re.search(r'id="data">(.*?)</script>', page_html, re.S).group(1))
    assert data["verdict"]["verdict"] == "mismatch"


def test_text_from_a_trace_cannot_become_markup():
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b[31m"
    row = {"id": evil, "response_ids": [1, 2], "rollout_logp": [-1.0, -2.0], "old_logp": [-1.5, -2.0], "source": {"model": evil}}
    trace = Trace.from_rows([row] * 3, path=evil)
    page = render(trace, measure(trace).to_dict(), None, title=evil, decode=lambda token: evil)
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "\\u202e" in page
    assert page.count("<script") == 1


def test_large_traces_stay_small():
    rng = np.random.default_rng(0)
    rows = []
    for k in range(2000):
        logp = -rng.exponential(1, 50)
        rows.append(
            {
                "id": str(k),
                "response_ids": [1] * 50,
                "rollout_logp": logp.tolist(),
                "old_logp": np.minimum(logp + rng.normal(0, 0.1, 50), 0).tolist(),
            }
        )
    trace = Trace.from_rows(rows)
    assert len(render(trace, measure(trace).to_dict(), None, title="large").encode()) < 1_000_000


def test_without_the_trainers_log_probs_it_says_so():
    page = render(Trace.from_rows([{"response_ids": [1], "rollout_logp": [-1.0]}]), None, None, title="x")
    assert "no old_logp" in page
    assert "Not diagnosed" in page


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 3), (0, 0.007), (12, 4000), (5, 5)])
def test_ticks_are_inside_and_round(low, high):
    marks = ticks(low, high)
    assert marks
    assert all(low - 1e-9 <= mark <= high + 1e-9 for mark in marks)
    assert len(marks) <= 12
