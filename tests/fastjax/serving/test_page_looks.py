"""The page in a headless Chromium: contrast, names and room of all that it shows, its colours, and the keyboard."""

import json

import pytest

from tests.support.browser import WIDTHS, ask
from tests.support.page_server import HOSTILE_NAME, Script, listening

pytestmark = [
    pytest.mark.exhaustive(by="tests/fastjax/serving/test_page.py::test_every_file_of_the_page_is_served_and_no_other")
]

CONTRAST = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const paint = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const bad = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest(':disabled, .unseen, .skip, noscript')) continue;
    const behind = [];
    for (let at = node; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
    const style = getComputedStyle(node);
    const [ground, ink] = [paint(behind), paint([...behind, node instanceof SVGElement ? style.fill : style.color])];
    const [low, high] = [light(ground), light(ink)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) bad.push(`${node.tagName} "${node.textContent.slice(0, 20)}" ${ratio.toFixed(2)}`);
  }
  return bad;
}"""
CUT_OFF = """() => [...document.querySelectorAll('body *')].filter((node) => {
  const box = node.getBoundingClientRect();
  const shown = node.checkVisibility() && box.width > 1 && !node.closest('.unseen, .skip');
  return shown && (box.right > innerWidth + 1 || box.left < -1);
}).map((node) => `${node.tagName} ${node.id} ${node.className}`)"""
NAMELESS = """() => [...document.querySelectorAll('button, select, input, textarea, [role=slider]')].filter((node) => {
  const name = node.ariaLabel || node.labels?.length || (node.tagName === 'BUTTON' && node.innerText.trim());
  return node.checkVisibility() && !name;
}).map((node) => node.outerHTML)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_text_has_contrast_and_nothing_is_cut_off(opened, tmp_path, width, scheme):
    """WCAG 2.2, level AA: 4.5:1 for text, no scrolling sideways, a name for each control."""
    rows = [{"step": n, "loss": 3 / n, "learning_rate": 1e-4, "tokens_per_second": 9e3} for n in range(1, 301)]
    rows += [{"step": 300, "eval_loss": 0.1}, {"step": 300, "event": "not_finite", "message": "x" * 300}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with listening(Script(run=tmp_path).app) as address:
        page = opened(address, width=width, scheme=scheme)

        def sound():
            return page.evaluate(CONTRAST) + page.evaluate(CUT_OFF) + page.evaluate(NAMELESS)

        page.wait_for_selector("#model option", state="attached")
        assert sound() == []
        page.select_option("#beside", HOSTILE_NAME)
        if width == 390:
            page.click("#open-settings")
        page.check("[name=tint]")
        page.click("#fields summary")
        assert sound() == []
        if width == 390:
            page.keyboard.press("Escape")
        ask(page, "think about rates " + "x" * 200)
        ask(page, "refuse")
        page.click("[role=region] .thought summary >> nth=0")
        page.locator(".answer > .text .token").nth(3).hover()
        assert page.is_visible("#tip") and sound() == []
        page.click("#tab-run")
        page.wait_for_selector(".plot path")
        assert sound() == [] and page.locator(".pill").text_content() == "loss not finite"


def test_the_chosen_colours_stay(opened):
    with listening(Script().app) as address:
        page = opened(address, scheme="light")
        ground = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(ground)
        for name in ("Light", "Dark"):
            page.click("#theme")
            assert page.locator("#theme").inner_text() == name
        dark = page.evaluate(ground)
        page.reload()
        page.wait_for_selector("#model option", state="attached")
        assert page.evaluate(ground) == dark != light


def test_all_is_reached_by_the_tab_key(opened):
    with listening(Script().app) as address:
        page = opened(address)
        page.wait_for_selector("#model option", state="attached")
        ask(page, "hello")
        page.evaluate("document.activeElement.blur()")
        about = "(({id, name, className}) => id || name || className)(document.activeElement)"
        seen = []
        for _ in range(40):
            page.keyboard.press("Tab")
            seen.append(page.evaluate(about))
        tools = [
            "clear",
            "open-settings",
            "theme",
            "log",
            "token shown",
            "quiet",
            "quiet retry",
            "prompt",
            "model",
            "beside",
        ]
        fields = [
            f"field-{name}" for name in ("system", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
        ]
        assert [name for name in (*tools, "close-settings", *fields, "tint") if name not in seen] == []
