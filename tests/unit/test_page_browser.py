"""The HTML report in a real browser: headless Chromium, driven by Playwright. Skipped where either is missing."""

import os
import shutil
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from sample_run import experiment, rmsnorm, softmax, started
from test_page import CEILINGS, HOSTILE, page_of
from test_report import measured

from autokernel.records import Decision, Verdict

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip install playwright)")

PHONE = {"width": 375, "height": 812}
DESKTOP = {"width": 1280, "height": 900}
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = "install your system's chromium, or run `python -m playwright install chromium`"

CONTRASTS = """() => {
  const rgba = (text) => [...text.matchAll(/[\\d.]+/g)].map(Number);
  const luminance = (text) => {
    const [r, g, b] = rgba(text).slice(0, 3).map((each) => {
      const value = each / 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const [, , , alpha = 1] = rgba(getComputedStyle(each).backgroundColor);
      if (alpha) return getComputedStyle(each).backgroundColor;
    }
    return "rgb(255, 255, 255)";
  };
  const told = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  return [...document.body.querySelectorAll("*")]
    .filter((element) => element.checkVisibility() && told(element) && !element.closest("title, .inside, script"))
    .map((element) => {
      const style = getComputedStyle(element);
      const ink = luminance(element.closest("svg") ? style.fill : style.color);
      const paper = luminance(ground(element));
      const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
      return { text: element.textContent.trim().slice(0, 40), contrast };
    });
}"""
"""The contrast, by WCAG 2, of every element that holds text and is shown."""


def chromium(playwright):
    """Path of a Chromium: the system's, or Playwright's own. None where there is neither."""
    own = Path(playwright.chromium.executable_path)
    return next(filter(None, map(shutil.which, NAMES)), str(own) if own.exists() else None)


@pytest.fixture(scope="module")
def tab():
    """One tab for all tests: to begin another takes longer than most of them."""
    with sync_api.sync_playwright() as playwright:
        path = chromium(playwright)
        if path is None:
            pytest.skip(f"no Chromium was found: {HOW}")
        # Chromium's own sandbox does not run as root, as in a container. The page is ours.
        arguments = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser.new_page()
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pages of a run with all that there can be in one, and of a run without anything."""
    known = replace(rmsnorm(), flops=8_000_000, nbytes=8_000_000)
    odd = started("matmul", starter_us=123_456.7)
    odd = odd.add(experiment(7, op="matmul", decision=Decision.KEEP, us=8.0, incumbent_us=123_456.7, idea="x" * 400))
    odd = odd.add(experiment(8, op="matmul", verdict=Verdict.TAMPER, us=None, incumbent_us=None, idea=HOSTILE))
    compiled = {"low": 1.4, "estimate": 1.5, "high": 1.6}
    texts = {
        "full": {
            "histories": [known, softmax(), odd],
            "plan": {"ceilings": CEILINGS, "plan": {}, "notes": []},
            "integration": measured(compile_speedup=compiled),
        },
        "empty": {"histories": []},
    }
    folder = tmp_path_factory.mktemp("pages")
    for name, changes in texts.items():
        (folder / name).mkdir()
        (folder / f"{name}.html").write_text(page_of(folder / name, **changes), encoding="utf-8")
    return folder


@contextmanager
def opened(tab, path, viewport=DESKTOP, scheme="light"):
    """The page, which in the end has complained of nothing and asked for nothing but its own file."""
    complaints, requests = [], []
    listeners = {
        "console": lambda message: complaints.append(message.text),
        "pageerror": lambda error: complaints.append(str(error)),
        "dialog": lambda dialog: complaints.append(dialog.message),
        "request": lambda request: requests.append(request.url),
    }
    tab.goto("about:blank")
    tab.set_viewport_size(viewport)
    tab.emulate_media(color_scheme=scheme, media="screen")
    for event, listener in listeners.items():
        tab.on(event, listener)
    try:
        tab.goto(path.as_uri())
        yield tab
    finally:
        for event, listener in listeners.items():
            tab.remove_listener(event, listener)
    assert complaints == []
    assert requests == [path.as_uri()]


def open_details(page):
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")


@pytest.mark.parametrize("name", ["full", "empty"])
@pytest.mark.parametrize("viewport", [PHONE, DESKTOP])
def test_no_page_is_wider_than_its_screen(tab, files, name, viewport):
    with opened(tab, files / f"{name}.html", viewport) as page:
        open_details(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP])
def test_plots_are_seen_and_their_text_is_legible_and_within(tab, files, viewport):
    with opened(tab, files / "full.html", viewport) as page:
        plots = page.evaluate(
            """() => [...document.querySelectorAll("svg.plot")].map((svg) => {
              const frame = svg.getBoundingClientRect();
              const texts = [...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
              const past = (box) => Math.max(frame.left - box.left, box.right - frame.right, box.bottom - frame.bottom);
              return { width: frame.width, height: frame.height, em: 12 * frame.width / svg.viewBox.baseVal.width,
                       past: Math.max(...texts.map(past)) };
            })"""
        )
    assert len(plots) == 7  # three of rmsnorm, two of each other op
    for plot in plots:
        assert plot["width"] >= 250
        assert plot["height"] >= 80
        assert 10 <= plot["em"] <= 18
        assert plot["past"] <= 12  # the page's own padding


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast(tab, files, scheme):
    with opened(tab, files / "full.html", scheme=scheme) as page:
        open_details(page)
        found = page.evaluate(CONTRASTS)
        assert len(found) > 100
        assert [each for each in found if each["contrast"] < 4.5] == []


def test_dark_is_dark(tab, files):
    grounds = {}
    for scheme in ("light", "dark"):
        with opened(tab, files / "full.html", scheme=scheme) as page:
            grounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert grounds == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}


def table(page, label):
    return page.get_by_role("region", name=label).get_by_role("table")


def column(page, label, title):
    """The cells under a header, from top to bottom, and the order that the header says they are in."""
    found = table(page, label)
    heads = found.locator("th").all_inner_texts()
    index = next(index for index, head in enumerate(heads) if head.startswith(title))
    cells = found.locator(f"tbody tr td:nth-child({index + 1})").all_inner_texts()
    return cells, found.locator("th").nth(index).get_attribute("aria-sort")


def test_a_click_sorts_by_numbers_and_what_is_unknown_stays_last(tab, files):
    label, title = "Table of all experiments", "Latency, us"
    with opened(tab, files / "full.html") as page:
        button = table(page, label).get_by_role("button", name=title)
        button.click()
        cells, order = column(page, label, title)
        assert order == "ascending"
        known = [float(cell.replace(",", "")) for cell in cells[:-2]]
        assert known == sorted(known)
        assert cells[-2:] == ["", ""]
        button.click()
        cells, order = column(page, label, title)
        assert order == "descending"
        assert [float(cell.replace(",", "")) for cell in cells[:-2]] == sorted(known, reverse=True)
        assert cells[-2:] == ["", ""]
        sorted_by = table(page, label).locator("th:not([aria-sort=none])").all_inner_texts()
        assert sorted_by == [title]


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_the_keyboard_sorts_by_words(tab, files, key):
    label = "Table of all kernels"
    with opened(tab, files / "full.html") as page:
        table(page, label).get_by_role("button", name="Op").focus()
        page.keyboard.press(key)
        assert column(page, label, "Op") == (["matmul", "rmsnorm", "softmax"], "ascending")
        page.keyboard.press(key)
        assert column(page, label, "Op") == (["softmax", "rmsnorm", "matmul"], "descending")


def test_the_keyboard_opens_a_diff(tab, files):
    with opened(tab, files / "full.html", PHONE) as page:
        details = page.locator("#kernel-rmsnorm details").first
        diff = details.get_by_role("region")
        assert not diff.is_visible()
        details.locator("summary").focus()
        page.keyboard.press("Enter")
        assert diff.is_visible()
        lines = [line.bounding_box() for line in diff.locator("span").all()]
        assert len(lines) >= 5
        assert all(above["y"] < below["y"] for above, below in pairwise(lines))
        page.keyboard.press("Space")
        assert not diff.is_visible()


def test_tab_goes_through_all_in_the_order_of_the_page_and_is_seen(tab, files):
    focusable = "a[href], button, summary, [tabindex='0']"
    with opened(tab, files / "full.html", PHONE) as page:
        page.evaluate(
            """(what) => [...document.querySelectorAll(what)].filter((each) => each.checkVisibility())
              .forEach((each, index) => { each.dataset.place = index; })""",
            focusable,
        )
        places = page.locator("[data-place]").count()
        assert places > 30
        for place in range(places):
            page.keyboard.press("Tab")
            at, outline, height = page.evaluate(
                """() => { const each = document.activeElement, style = getComputedStyle(each);
                  return [each.dataset.place, style.outlineStyle, each.getBoundingClientRect().height]; }"""
            )
            assert (at, outline) == (str(place), "solid")
            assert height >= 15


def test_links_lead_to_their_kernel(tab, files):
    with opened(tab, files / "full.html", PHONE) as page:
        table(page, "Table of all kernels").get_by_role("link", name="matmul").click()
        top = page.locator("#kernel-matmul").bounding_box()["y"]
        assert 0 <= top <= 20


def test_on_paper_the_diffs_are_open_and_nothing_moves(tab, files):
    with opened(tab, files / "full.html") as page:
        assert page.evaluate("document.getAnimations().length") == 0
        assert not page.locator("pre.diff").first.is_visible()
        page.emulate_media(media="print")
        assert page.locator("pre.diff").first.bounding_box()["height"] > 50
        assert page.locator("nav").is_hidden()


def test_paper_is_white_and_as_wide_as_the_text(tab, files):
    with opened(tab, files / "full.html", {"width": 720, "height": 1000}, "dark") as page:
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.evaluate("document.documentElement.scrollWidth") <= 720


def test_whatever_an_agent_wrote_does_nothing(tab, files):
    with opened(tab, files / "full.html") as page:
        open_details(page)
        assert page.locator("img, iframe").count() == 0
        assert page.locator("script").count() == 1
        assert page.get_by_text("TAMPER").first.is_visible()
