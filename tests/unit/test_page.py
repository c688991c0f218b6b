"""The HTML report: it parses, loads nothing, escapes everything, and holds every experiment and its plots."""

import base64
import hashlib
import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from sample_run import SETTINGS, experiment, rmsnorm, softmax, started
from test_report import measured, write_run

from autokernel import report
from autokernel.cli import main
from autokernel.markup import Markup, one_line, tag
from autokernel.page import render_page
from autokernel.records import Decision, Verdict
from autokernel.state import load_state

MARKUP = "</script></title><script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)>"
HOSTILE = f"{MARKUP}\x1b[2J\u202e\0&amp;'"
CEILINGS = {"device": "cpu", "copy_gbps": 20.0, "gemm_tflops": {"fp32": 0.1}, "cached": []}


class Page(HTMLParser):
    """The elements of a page, with their attributes; fails when one is closed that is not the innermost open one."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name != "meta":
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.text += data

    def of(self, name):
        return [attributes for element, attributes in self.elements if element == name]


def page_of(workdir, **changes):
    run = write_run(workdir, **changes)
    state = load_state(run)
    return render_page(report.from_state(run.name, state), state)


def hostile_history():
    history = started().add(experiment(1, decision=Decision.KEEP, us=800.0, idea=HOSTILE, reason=HOSTILE))
    tampered = experiment(2, verdict=Verdict.TAMPER, us=None, incumbent_us=None, idea=HOSTILE, reason=HOSTILE)
    delegated = experiment(3, verdict=Verdict.DELEGATES, us=None, incumbent_us=None, idea="calls a library")
    return history.add(tampered).add(delegated).stopped(HOSTILE)


@pytest.fixture
def text(tmp_path):
    return page_of(tmp_path)


def test_the_page_is_well_formed_and_complete(text):
    page = Page(text)
    assert text.startswith('<!doctype html>\n<html lang="en">')
    for told in (
        "Whole model",
        "not measured",
        "1,000 us (starter) \N{RIGHTWARDS ARROW} 500.0 us (2.00x)",
        "Moved on3 reverts in a row",
        "2 kept, 1 reverted, 1 screened out, 1 CRASH",
        "9 x 512x384 fp32, on Example CPU",
    ):
        assert told in page.text
    assert "SLOWER, 0.50x its fastest way, eager (eager 200.0 us, compile 400.0 us)" in page.text
    assert "autokernel judge .autokernel/20300102-0304-llama/optimized/rmsnorm/kernel.py --op rmsnorm" in page.text


def test_the_page_loads_nothing(text):
    assert not re.search(r"https?://|//\w|@import|url\(", text)
    for name, attributes in Page(text).elements:
        assert name not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "srcset", "style"} & attributes.keys()
        assert attributes.get("href", "#").startswith("#")


def test_links_lead_to_what_is_there(text):
    page = Page(text)
    targets = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    links = {each["href"].removeprefix("#") for each in page.of("a")}
    assert {"whole-model", "reproduce", "kernel-rmsnorm", "kernel-softmax"} <= links <= targets


def test_only_the_pages_own_script_and_style_may_run(text):
    page = Page(text)
    policy = next(each["content"] for each in page.of("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    for name in ("style", "script"):
        content = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy


def test_every_experiment_is_in_the_table(text):
    page = Page(text)
    assert [each["id"] for each in page.of("tr") if "id" in each] == [f"experiment-{number}" for number in range(1, 7)]
    for told in ("vectorized loads", "SCREENED", "CRASH", "compile error"):
        assert told in page.text


def test_headers_are_buttons_that_say_how_the_table_is_sorted(text):
    page = Page(text)
    heads = page.of("th")
    assert len(page.of("button")) == len(heads) >= 8
    assert Counter(each["aria-sort"] for each in heads) == {"ascending": 1, "none": len(heads) - 1}
    assert all(each["scope"] == "col" for each in heads)


def test_what_scrolls_can_be_reached_by_the_keyboard(text):
    page = Page(text)
    scrolling = [each for each in page.of("div") if each.get("class") == "scroll"] + page.of("pre")
    assert scrolling
    assert all(each.get("tabindex") == "0" and each.get("aria-label") for each in scrolling)


def test_light_and_dark_have_colours_for_the_same_names(text):
    light, dark = (set(re.findall(r"(--\w+):", block)) for block in re.findall(r":root \{(.*?)\}", text, re.DOTALL))
    assert light == dark
    assert set(re.findall(r"var\((--\w+)\)", text)) <= light


def test_plots_tell_kept_and_rejected_apart_by_shape(text):
    page = Page(text)
    assert len(page.of("svg")) == 4  # progress and shares of two ops
    assert all(each["role"] == "img" and each["aria-label"] for each in page.of("svg"))
    marks = Counter(each["class"] for each in page.of("g"))
    assert marks == {"mark kept": 2, "mark rejected": 3, "mark untimed": 1}
    assert len(page.of("circle")) == 2
    assert "NaN" not in text
    assert "nan" not in re.findall(r'[xydr12c]+="([^"]*)"', text)


def test_the_roofline_is_drawn_where_work_and_ceilings_are_known(tmp_path):
    known = replace(rmsnorm(), flops=8_000_000, nbytes=8_000_000)
    text = page_of(tmp_path, histories=[known, softmax()], plan={"ceilings": CEILINGS, "plan": {}, "notes": []})
    titles = [each["aria-label"] for each in Page(text).of("svg")]
    assert "rmsnorm: roofline, 1 FLOP/byte, memory-bound" in titles
    assert not any(title.startswith("softmax: roofline") for title in titles)
    assert "best kernel: 0.016 TFLOP/s (500.0 us)" in text


def test_whatever_an_agent_wrote_is_text(tmp_path):
    text = page_of(tmp_path, histories=[hostile_history()])
    page = Page(text)
    assert len(page.of("script")) == 1
    assert page.of("img") == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert MARKUP in page.text
    assert not re.search("[\0\x1b\u202e]", text)


def test_suspicious_experiments_stand_out(tmp_path):
    text = page_of(tmp_path, histories=[hostile_history()])
    page = Page(text)
    assert "Look at these" in page.text
    assert "\N{WARNING SIGN} TAMPER" in page.text
    assert "\N{WARNING SIGN} DELEGATES" in page.text
    assert [each["class"] for each in page.of("g")].count("mark suspicious") == 2
    assert "Look at these" not in page_of(tmp_path)


def test_kept_changes_are_shown_as_diffs(text):
    assert '<span class="del">-starter text\n</span><span class="add">+text 1\n</span>' in text
    assert '<span class="del">-text 1\n</span><span class="add">+text 5\n</span>' in text
    assert "text 2" not in text


def test_the_headline_tells_both_ways_of_pytorch_and_losses(tmp_path):
    compiled = {"low": 1.4, "estimate": 1.5, "high": 1.6}
    page = Page(page_of(tmp_path, integration=measured(compile_speedup=compiled)))
    assert "1.250xagainst eager: faster95 % interval 1.200 to 1.300; 100.00 \N{RIGHTWARDS ARROW} 80.00 ms" in page.text
    assert "0.833xagainst torch.compile: SLOWER95 % interval 0.750 to 0.929" in page.text
    assert [each.get("class") for each in page.of("b")][:2] == ["good", "bad"]


def test_the_headline_takes_the_measurement_against_torch_compile_where_there_is_one(tmp_path):
    compiled, over = {"low": 1.4, "estimate": 1.5, "high": 1.6}, {"low": 1.01, "estimate": 1.02, "high": 1.03}
    page = Page(page_of(tmp_path, integration=measured(compile_speedup=compiled, speedup_over_compile=over)))
    assert "1.020xagainst torch.compile: faster95 % interval 1.010 to 1.030; measured in turns" in page.text


def test_a_headline_against_torch_compile_that_is_missing_is_seen_to_be_missing(tmp_path):
    page = Page(page_of(tmp_path, integration=measured(compile_note="torch.compile was not measured: too slow")))
    assert "not measuredagainst torch.compile" in page.text
    assert "torch.compile was not measured: too slow" in page.text


def test_a_kernel_tells_whether_the_model_uses_it(tmp_path):
    page = Page(page_of(tmp_path, integration=measured()))
    assert "In the modelused, 9 calls per forward" in page.text
    assert "In the modelleft out: no sure gain in the whole model" in page.text


def test_tokens_and_cost_are_told_for_each_kept_experiment(tmp_path):
    asked = experiment(1, decision=Decision.KEEP, us=800.0)
    asked = replace(asked, proposal=replace(asked.proposal, tokens=3000, cost_usd=0.02, agent="anthropic"))
    page = Page(page_of(tmp_path, histories=[started().add(asked).add(experiment(2, us=790.0, incumbent_us=800.0))]))
    assert "Tokens3000, 3000 per kept experiment" in page.text
    assert "Cost0.0200 USD, 0.0200 USD per kept experiment" in page.text


def test_a_run_without_any_op_has_a_page(tmp_path):
    page = Page(page_of(tmp_path, histories=[]))
    assert "None was started." in page.text
    assert "There was none." in page.text


def test_report_command_writes_the_page_and_says_where(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path, settings=replace(SETTINGS, model="/opt/secret-folder/llama.py:build"))
    monkeypatch.chdir(tmp_path)
    for module in ("matplotlib", "matplotlib.backends.backend_agg"):  # another test may have imported it
        monkeypatch.setitem(sys.modules, module, None)
    for arguments, path in ([], run.page_path), (["--out", "page.html"], tmp_path / "page.html"):
        with pytest.raises(SystemExit) as caught:
            main(["report", "--html", *arguments])
        assert caught.value.code == 0
        out, err = capsys.readouterr()
        assert (tmp_path / out.strip()).samefile(path)
        assert "progress.png was not drawn: matplotlib is not installed" in err
        page = path.read_text()
        assert "llama.py:build" in page
        assert "secret-folder" not in page
        assert str(tmp_path) not in page


def test_report_command_cannot_write_into_a_folder_that_is_not_there(tmp_path, monkeypatch, capsys):
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["report", "--html", "--out", "no/such/page.html"])
    assert caught.value.code == 2
    assert "no/such/page.html cannot be written" in capsys.readouterr().err


def test_markup_is_escaped_once():
    assert tag("p", "a < b", Markup("<b>"), class_='"x"', data_key=1.5, id=None) == (
        '<p class="&quot;x&quot;" data-key="1.5">a &lt; b<b></p>'
    )
    assert one_line("a\n\tb\x1b[31m") == "a b\N{REPLACEMENT CHARACTER}[31m"


def luminance(colour):
    """Relative luminance of #rgb or #rrggbb, as WCAG 2 defines it."""
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    channels = [int(digits[start : start + 2], 16) / 255 for start in (0, 2, 4)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", [0, 1])
@pytest.mark.parametrize(
    ("ground", "inks"),
    [
        ("--paper", ("--ink", "--quiet", "--good", "--bad", "--warn", "--link")),
        ("--panel", ("--ink", "--quiet", "--good", "--bad", "--warn", "--link")),
        ("--added", ("--good",)),
        ("--gone", ("--bad",)),
    ],
)
def test_text_can_be_read_in_light_and_dark(text, scheme, ground, inks):
    block = re.findall(r":root \{(.*?)\}", text, re.DOTALL)[scheme]
    colours = dict(re.findall(r"(--\w+): (#\w+)", block))
    for name in inks:
        low, high = sorted((luminance(colours[name]), luminance(colours[ground])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, name
