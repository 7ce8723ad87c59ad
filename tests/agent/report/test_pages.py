"""Every page in a real browser, at the width of a phone and of a desk: no sideways scrolling, no error, every control
within reach of the keyboard, and no serious finding of axe-core (where ``AXE`` names its file; see ``browser.py``)."""

import re

import pytest
from browser import AXE, CHROMIUM, ROOT, Browser
from dynamiccl.agent.report.html.report import write_report
from dynamiccl.agent.report.summary import RunSummary
from make_pictures import pictures
from synthetic_trace import write_run

NAMES = ("report", "live", "early")
PICTURES = ROOT / "agent" / "pictures"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    summary, trace = write_run(folder / "a" / "trace")
    early, short = write_run(folder / "b" / "trace", search=3, stop_early=True)
    found = {"report": write_report(folder / "report.html", RunSummary.of(summary), trace)}
    unfinished = RunSummary.of({**summary, "speedup": None})
    found["live"] = write_report(folder / "live.html", unfinished, trace)
    found["early"] = write_report(folder / "early.html", RunSummary.of(early), short)
    assert set(found) == set(NAMES)
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("width", [360, pytest.param(1280, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_a_page_fits_its_window_and_is_worked_by_keyboard_without_an_error(browser, pages, name, width):
    page = browser.open(pages[name], width)
    assert page.errors() == [] and page.overflow() == 0
    count, missed = page.unreached()
    assert missed == [] and count > 0
    page.resize(2 * width, 900)  # turned, or the window pulled wider
    page.resize(width, 900)
    page.run("new Promise(done => setTimeout(done, 300))")
    assert page.overflow() == 0 and page.errors() == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", NAMES)
def test_axe_finds_nothing_serious(browser, pages, name, width, dark):
    if AXE is None:
        pytest.skip("axe-core is not here: npm install axe-core, AXE=node_modules/axe-core/axe.min.js")
    page = browser.open(pages[name], width, dark=dark)
    assert page.findings() == []


def test_the_checks_see_what_is_wrong(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><html><body><div style='width:3000px'>wide</div><button tabindex=5>one</button>"
        "<select onkeydown='event.preventDefault()'><option>1</select><button>never</button>"
        "<img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='><script>console.error('no'); nothing.there()</script>"
    )
    page = browser.open(bad, 390)
    assert len(page.errors()) == 2 and page.overflow() > 0
    count, missed = page.unreached()
    assert count == 3 and any("never" in m for m in missed)
    if AXE is not None:
        assert {rule for rule, *_ in page.findings()} >= {"html-has-lang", "image-alt"}


def test_the_pictures_are_those_that_are_drawn_today():
    """Stale ones fail: `make pictures` draws them anew, of the run that comes with the package."""
    pytest.importorskip("matplotlib")
    drawn = pictures()
    assert {path.name for path in PICTURES.iterdir()} == set(drawn)
    for name, text in drawn.items():
        assert (PICTURES / name).read_text(encoding="utf-8") == text, f"{name} is stale: make pictures"
        assert len(text) < 150_000 and not re.search(r"(src|href)=|url\(.?http|@import", text)


def test_the_demos_picture_explains_itself():
    """Before: no legend, peaks that nobody explained, and no return to the default after `stop`."""
    svg = (PICTURES / "demo.svg").read_text(encoding="utf-8")
    for text in (
        "a kept table is current",
        "steps on trial under another table",
        "Peaks: every ",
        "emulated",
    ):
        assert text in svg
