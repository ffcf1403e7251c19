"""The page in a real browser: no network, no script, verdict first; and what hostile text can do to it (nothing)."""

import copy
import json
import re
from itertools import pairwise

import numpy as np
import pytest
from playwright.sync_api import sync_playwright

from unskew.lab import recorded_path
from unskew.measure import measure
from unskew.report import markdown, render
from unskew.report._floor import NoiseFloor, expected
from unskew.report._svg import ticks
from unskew.trace import Trace, read

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b[31m\x00'\"--><!--"


@pytest.fixture(scope="module")
def verdict():
    return json.loads(recorded_path("verdict.json").read_text())


@pytest.fixture(scope="module")
def page_html(verdict):
    trace = read(recorded_path())
    return render(trace, measure(trace).to_dict(), verdict, title="a run")


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


def gaussian(rows, tokens, sigma, **columns):
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(1, rows * tokens)
    noise = rng.normal(0, sigma, rows * tokens)
    return Trace.from_packed(
        cu_seqlens=np.arange(rows + 1) * tokens, response_ids=np.arange(rows * tokens) % 97, rollout_logp=rollout,
        old_logp=np.minimum(rollout + noise, 0), rows=columns or None,
    )  # fmt: skip


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
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    assert requests == [path.as_uri()]
    assert errors == []
    assert page.locator("#word").inner_text() == "Mismatch"
    assert page.locator("#word").bounding_box()["y"] < 300
    assert page.locator(".numbers tbody tr").count() == 7
    assert page.locator("#cause-1 h3 code").inner_text() == "sampling.temperature"
    assert page.locator("#plots figure > svg").count() == 4
    assert page.locator("#worst mark").count() == 8
    order = page.locator("main > section").evaluate_all("all => all.map(e => e.id)") if javascript else None
    assert order in (None, ["verdict", "", "causes", "ladder", "left", "plots", "worst", "environment"])
    # The style sheet is allowed by its hash: were the policy to block it, this would be black.
    assert page.locator("#word").evaluate("e => getComputedStyle(e).color") == "rgb(176, 50, 31)" if javascript else True
    context.close()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_a_narrow_screen_and_text_is_readable(browser, page_html, tmp_path, scheme):
    path = tmp_path / "report.html"
    path.write_text(page_html)
    page = browser.new_page(viewport={"width": 380, "height": 800}, color_scheme=scheme)
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    contrast = page.evaluate("""() => {
      const light = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255).map(x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
        return .2126 * v[0] + .7152 * v[1] + .0722 * v[2] };
      const page = light(getComputedStyle(document.body).backgroundColor);
      return ['body', '.soft', '#word', 'nav a', '.error .severity', 'figcaption', 'summary'].map(s => {
        const ink = light(getComputedStyle(document.querySelector(s)).color);
        return (Math.max(ink, page) + .05) / (Math.min(ink, page) + .05) }) }""")
    assert min(contrast) > 4.5
    page.close()


@pytest.mark.browser
def test_print_opens_the_fixes(browser, page_html, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page_html)
    page = browser.new_page(color_scheme="dark")
    page.goto(path.as_uri())
    snippet = page.locator("#cause-1 pre").first
    assert not snippet.is_visible()
    page.emulate_media(media="print")
    assert snippet.bounding_box()["height"] > 20
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert len(page.pdf()) > 10_000
    page.close()


@pytest.mark.browser
def test_every_picture_has_words_and_headings_do_not_skip(browser, page_html, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page_html)
    page = browser.new_page()
    page.goto(path.as_uri())
    assert page.locator("svg:not([aria-hidden]):not([role=img])").count() == 0
    assert page.evaluate(
        "[...document.querySelectorAll('svg[role=img]')].every(s => s.querySelector('title').textContent.length > 10)"
    )
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and max(b - a for a, b in pairwise(levels)) <= 1
    assert page.evaluate(
        "[...document.querySelectorAll('[id]')].length == new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size"
    )
    page.close()


@pytest.mark.browser
def test_hostile_text_runs_nothing(browser, verdict, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(hostile_page(verdict), "utf-8")
    page = browser.new_page()
    dialogs, requests = [], []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    assert dialogs == [] and requests == [path.as_uri()]
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    assert json.loads(page.locator("#data").inner_text())["verdict"]["summary"] == EVIL
    page.close()


def hostile_verdict(verdict):
    out = copy.deepcopy(verdict)
    out["summary"] = EVIL
    cause = out["causes"][0]
    cause |= {"id": EVIL, "side": EVIL, "says": EVIL, "refute": EVIL, "parameters": {EVIL: EVIL}, "class": [EVIL, "x"]}
    cause["evidence"][0]["tokens"][0] |= {"id": EVIL * 100, "text": EVIL}
    cause["fix"]["snippets"] = [[EVIL, EVIL, EVIL]]
    out["unchecked"] = [{"what": EVIL, "why": EVIL, "next": EVIL}]
    return out


def hostile_page(verdict):
    row = {"id": EVIL, "response_ids": [1, 2], "rollout_logp": [-1.0, -2.0], "old_logp": [-1.5, -2.0], "source": {"model": EVIL}}
    trace = Trace.from_rows([row, {**row, "id": "x" * 10_000}], path=EVIL)
    return render(trace, measure(trace).to_dict(), hostile_verdict(verdict), title=EVIL, tokenizer_texts=[EVIL] * 3)


def test_text_from_a_trace_cannot_become_markup_or_act_on_a_terminal(verdict):
    page = hostile_page(verdict)
    assert "<script>alert" not in page and "<img" not in page
    assert page.count("<script") == 1 and page.count("</script") == 1
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", page)
    assert "⟨202E⟩" in page and "⟨1B⟩[31m" in page
    assert "x" * 100 not in page


def test_markdown_shows_the_verdict_and_cannot_be_made_to_ping_or_to_end_a_block(verdict):
    text = markdown(verdict, None)
    assert text.startswith("### ❌ Mismatch")
    assert "`sampling.temperature`" in text and "explains 99.1\N{NO-BREAK SPACE}% of the gap" in text
    out = hostile_verdict(verdict)
    out["causes"][0]["says"] = "@all see #1 and [a](http://x) | `b`"
    out["causes"][0]["fix"]["snippets"] = [["trl", "python", "```\n@all"]]
    evil = markdown(out, None)
    assert "@all see" not in evil and "#1" not in evil and "[a](" not in evil
    assert "<script" not in re.sub(r"(`+).*?\1", "", evil, flags=re.S)
    assert "\n````python\n```\n@all\n````\n" in evil


def test_same_bytes_again_small_and_with_the_data_inside(page_html, verdict):
    trace = read(recorded_path())
    assert render(trace, measure(trace).to_dict(), verdict, title="a run") == page_html
    assert len(page_html.encode()) < 1_000_000
    data = json.loads(re.search(r'id="data">(.*?)</script>', page_html, re.S).group(1))
    assert data["verdict"] == verdict
    assert data["measurement"]["overall"]["mean_abs"]["n"] == 2338
    assert str(recorded_path().parent) not in page_html


def test_large_traces_stay_small_and_say_that_they_are_sampled():
    trace = gaussian(6000, 20, 0.1, id=[f"{k}" * 30 for k in range(6000)])
    page = render(trace, measure(trace).to_dict(), None, title="large")
    assert len(page.encode()) < 1_000_000
    assert "4,000 of 6,000 sequences" in page
    assert "600 of 4,000 sequences" in page
    small = gaussian(2000, 50, 0.1)
    assert "evenly spaced; numbers" not in (page := render(small, measure(small).to_dict(), None, title="x"))
    assert len(page.encode()) < 1_000_000


def test_the_worst_token_is_found_among_rows_that_are_not_drawn():
    trace = gaussian(6000, 4, 1e-3)
    old = trace.tokens("rollout_logp").copy()
    old[4 * 1001 + 2] -= 5
    page = render(trace.with_tokens(old_logp=old), None, None, title="x")
    assert "row 1001" in page and "token 2: d = −5 nat" in page


def test_without_the_trainers_log_probs_or_a_verdict_it_says_so():
    page = render(Trace.from_rows([{"response_ids": [1], "rollout_logp": [-1.0]}]), None, None, title="x")
    assert "no <code>old_logp</code>" in page
    assert "Not diagnosed" in page and "unskew diagnose TRACE --model DIR --save verdict.json" in page


def test_missing_numbers_are_words(verdict):
    bare = {
        "schema_version": 1,
        "verdict": "inconclusive",
        "causes": [{"id": "sampling.top-p", "severity": "warn", "explained": None}],
    }
    page = render(gaussian(4, 5, 0.1), None, bare, title="x")
    assert "Inconclusive" in page and "not known" in page
    assert "Inconclusive" in markdown(bare, None)
    holed = copy.deepcopy(verdict)
    holed["unexplained"] = holed["floor"]["logit_noise"]["value"] = None
    holed["causes"][0]["interval"] = [float("nan"), 1.0]
    holed["causes"][1]["explained"] = float("nan")
    holed["gap"]["logit_noise"]["value"] = "nan"
    holed["causes"][0]["evidence"][0]["tokens"][0]["rollout_logp"] = float("-inf")
    page = render(read(recorded_path()), None, holed, title="x")
    assert "NaN to 100" in page and "−∞" in page
    assert "None" not in page and 'd="Mnan' not in page and 'width="nan' not in page
    assert json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))["verdict"]["verdict"] == "mismatch"


@pytest.mark.parametrize("rows", [
    [{"response_ids": [3], "rollout_logp": [-0.5], "old_logp": [-0.5]}],
    [{"response_ids": [3], "rollout_logp": [0.0], "old_logp": [0.0]}],
    [{"response_ids": [3, 4], "rollout_logp": [-0.5, -900.0], "old_logp": [-900.0, -0.5]}],
    [{"response_ids": [3, 4], "rollout_logp": [-1e-30, -1.0], "old_logp": [-2e-30, -1.0]}],
    [{"response_ids": [3, 4], "rollout_logp": [-1.0, -1.0], "old_logp": [-1.0, -1.0], "mask": [0, 0]}],
    [{"response_ids": [], "rollout_logp": [], "old_logp": []}, {"response_ids": [3], "rollout_logp": [-1.0], "old_logp": [-2.0]}],
    [{"response_ids": [3, 4], "rollout_logp": [-1.0, float("nan")], "old_logp": [-1.5, float("-inf")]}],
])  # fmt: skip
def test_odd_traces_are_drawn(rows, verdict):
    page = render(Trace.from_rows(rows), None, verdict, title="x", tokenizer_texts=["a"] * 4)
    drawn = re.findall(r'(?:points|cx|cy|x1|y1|width|height|d)="([^"]*)"', page)
    assert not [numbers for numbers in drawn if "nan" in numbers or "inf" in numbers]
    assert len(page) < 1_000_000


def test_context_reaches_into_the_prompt_and_marks_what_is_not_in_the_loss():
    row = {"prompt_ids": [0, 1], "response_ids": [2, 3], "rollout_logp": [-1.0, -1.0], "old_logp": [-3.0, -9.0], "mask": [1, 0]}
    page = render(Trace.from_rows([row]), None, None, title="x", tokenizer_texts=["Hi ", "\n", "yes", "\u202eno"])
    text = re.search(r'class="text" dir="ltr">(.*?)</p>', page).group(1)
    assert re.findall(r"<bdi>(.*?)</bdi>", text) == ["Hi·", "↵", "yes", "⟨202E⟩no"]
    assert re.findall(r'class="t ([a-z0-9]+)"', text) == ["out", "out", "h5", "out"]


def test_figures_expected_at_the_floor_are_what_noise_there_gives():
    rng, rows, tokens = np.random.default_rng(1), 4000, 20
    scale = rng.uniform(0.2, 1.0, rows * tokens)
    d = rng.normal(0, 0.1 * scale)
    d -= (0.1 * scale) ** 2 / 2
    row = np.repeat(np.arange(rows), tokens)
    at = expected(NoiseFloor(0.1, scale), np.ones(rows * tokens, bool), row, rows)
    weights = np.exp(np.bincount(row, d))
    assert at["mean_abs"] == pytest.approx(np.abs(d).mean(), rel=0.02)
    assert at["kl_rollout_old_k3"] == pytest.approx((np.expm1(d) - d).mean(), rel=0.02)
    assert at["ess_sequence"] == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / rows, rel=0.02)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 3), (0, 0.007), (12, 4000), (5, 5), (-1e-12, 1e-12)])
def test_ticks_are_inside_and_round(low, high):
    marks = ticks(low, high)
    assert marks
    assert all(low - abs(low) * 1e-9 <= mark <= high + abs(high) * 1e-9 for mark in marks)
    assert len(marks) <= 12
