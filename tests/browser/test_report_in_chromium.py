"""Reports in a real Chromium: quiet, by themselves, readable in both schemes and on a phone."""

import pytest

import chromium
import run_cases
from chromium import DESK, PHONE, opened
from report_pages import page_of
from run_cases import record, write_environment

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(chromium.missing()), reason=chromium.missing() or ""),
]
LEAST_CONTRAST = 4.5  # of WCAG 2.2, level AA
STEPS = 240


def write_run(root, rate):
    """A run directory of some hundred records, an evaluation in ten."""
    records = [
        record(
            step,
            1 - 100 / (step + 100) if step % 10 == 0 else None,
            loss=2 + 60 / (step + 10) + step % 7 / 50,
            learning_rate=rate,
            samples_per_s=1000 + step % 11,
            tokens_per_s=50_000 + step % 13,
            skipped_steps=1 if step == 50 else 0,
            clipped_fraction=step % 3 / 3,
        )
        for step in range(1, STEPS + 1)
    ]
    run_cases.write_run(root, records, overrides=[f"optim.learning_rate={rate}"])
    write_environment(root / "run_0", commit="0a1b2c3d" * 5)
    return root


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A report of one run, and one of three with long names."""
    root = tmp_path_factory.mktemp("runs")
    one = write_run(root / "one", 1e-3)
    long = [write_run(root / f"{'a_long_name_' * 4}{n}", n / 1000) for n in (2, 3)]
    pages = {"one": root / "one.html", "several": root / "several.html"}
    pages["one"].write_text(page_of(one), encoding="utf-8")
    pages["several"].write_text(page_of(one, *long), encoding="utf-8")
    return pages


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["one", "several"])
def test_a_page_is_quiet_alone_and_fits(pages, name, scheme, width):
    with opened(pages[name], scheme, width) as tab:
        tab.run("for (const each of document.querySelectorAll('details')) each.open = true")
        assert tab.console() == []
        assert tab.requests() == [pages[name].as_uri()]
        assert tab.run("return [innerWidth, document.documentElement.scrollWidth]") == [width] * 2
        assert tab.run(OUTSIDE) == []
        assert tab.run(CLIPPED) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_and_curves_are_told_apart(pages, scheme):
    with opened(pages["several"], scheme, DESK) as tab:
        contrasts = tab.run(CONTRASTS)
        assert len(contrasts) > 100
        assert [each for each in contrasts if each["contrast"] < LEAST_CONTRAST] == []
        is_light = tab.run(f"{LUMINANCE} return luminance(colour(document.body)) > 0.5")
        assert is_light == (scheme == "light")
        assert len(set(tab.run(STROKES))) == 3


def test_nothing_of_a_hostile_run_runs(tmp_path):
    attack = "<img src=http://127.0.0.1:9/x onerror=\"document.title='ran'\">"
    attack += "</script></title><script>document.title='ran'</script>"
    root = write_run(tmp_path / "<svg onload=document.title='ran'>", 1e-3)
    write_environment(root / "run_0", **{attack: attack, "device": f"\"'>{attack}"})
    page = tmp_path / "page.html"
    page.write_text(page_of(root), encoding="utf-8")
    with opened(page, "dark", PHONE) as tab:
        assert tab.run("return document.title").startswith("Report: <svg onload")
        assert tab.console() == [] and tab.requests() == [page.as_uri()]
        assert tab.run("return document.images.length") == 0


def test_the_policy_stops_a_script_that_came_in(pages, tmp_path):
    page = tmp_path / "page.html"
    text = pages["one"].read_text("utf-8")
    injected = "<body><script>document.title = 'ran'</script><img src='http://127.0.0.1:9/x'>"
    page.write_text(text.replace("<body>", injected), encoding="utf-8")
    with opened(page, "light", DESK) as tab:
        assert tab.run("return document.title") == "Report: one"
        said = " ".join(tab.console())
        assert "script" in said and "image" in said  # Chromium names what it has refused


# Elements that reach beyond the window, but for those within what scrolls by itself.
OUTSIDE = """
return [...document.querySelectorAll('body *')].filter((each) => {
  const box = each.getBoundingClientRect();
  return box.width && (box.right > innerWidth + 0.5 || box.left < -0.5)
    && !each.closest('.scroll, .plot');
}).map((each) => `${each.tagName} ${each.className} ${each.textContent.slice(0, 40)}`);
"""
# Boxes whose text is wider than they are.
CLIPPED = """
return [...document.querySelectorAll('.tile, .card, .badge, .legend li')]
  .filter((each) => each.scrollWidth > each.clientWidth + 1)
  .map((each) => `${each.className} ${each.textContent.slice(0, 40)}`);
"""
LUMINANCE = """
const parts = (text) => text.match(/[\\d.]+/g).map(Number);
const colour = (each) => {
  for (let at = each; at; at = at.parentElement) {
    const found = parts(getComputedStyle(at).backgroundColor);
    if (found.length === 3 || found[3] > 0) return found;
  }
  return [255, 255, 255];
};
const luminance = (rgb) => rgb.slice(0, 3).map((part) => part / 255)
  .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
  .reduce((sum, part, number) => sum + part * [0.2126, 0.7152, 0.0722][number], 0);
"""
# Of every text that is shown: its colour against what is behind it, as WCAG defines contrast.
CONTRASTS = (
    LUMINANCE
    + """
const found = [];
for (const each of document.querySelectorAll('body *')) {
  const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!own || !each.getClientRects().length || each.tagName === 'title') continue;
  const style = getComputedStyle(each);
  const ink = luminance(parts(each instanceof SVGElement ? style.fill : style.color));
  const paper = luminance(colour(each));
  const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  found.push({ contrast, text: each.textContent.slice(0, 40), name: each.getAttribute('class') });
}
return found;
"""
)
STROKES = """
return [...document.querySelectorAll('.chart-loss path')]
  .map((each) => getComputedStyle(each).stroke);
"""
