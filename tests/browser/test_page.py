"""The HTML page in a real browser: narrow and wide, light and dark, by mouse, by keyboard, and without a script."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.cells import slug
from harness.matrix import Matrix
from harness.views.html import html
from harness.views.material import Material, gather
from tests.browser import sample, sample_hung, sample_targets

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
VIEWS = list(product((390, 1280), ("light", "dark")))
FAILED = slug("vllm-0.8.5@cpu/multimodal_rollout[model=qwen2_vl]")

SIDEWAYS = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"

# Text whose contrast with what lies behind it is below WCAG 2.2 AA. All backgrounds of the page are opaque.
FAINT = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (color) => rgb(color).slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if ((rgb(color)[3] ?? 1) > 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = new Set();
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !element.checkVisibility() || element.closest("script, style")) continue;
    const tones = [light(getComputedStyle(element).color), light(behind(element))].sort((a, b) => b - a);
    const ratio = (tones[0] + 0.05) / (tones[1] + 0.05);
    if (ratio < 4.5) found.add(`${texts.currentNode.data.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return [...found];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists() and not os.environ.get("CI"):
        pytest.skip(f"there is no {CHROMIUM}: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return sample.sample()


@pytest.fixture(scope="module")
def address(matrix: Matrix, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, suite = sample.write(tmp_path_factory.mktemp("results"), matrix)
    (folder / "matrix.html").write_text(html(matrix, gather(matrix, folder, suite), sample.NOW))
    return (folder / "matrix.html").as_uri()


def watched(page: Page, troubles: list[str]) -> Page:
    """Note what must not happen: a message of the browser, an exception, a request for anything but the page."""
    page.on("console", lambda message: troubles.append(f"console: {message.type}: {message.text}"))
    page.on("pageerror", lambda error: troubles.append(f"exception: {error}"))
    page.on(
        "request", lambda request: None if request.is_navigation_request() else troubles.append(f"asks: {request.url}")
    )
    return page


def open_page(browser: Browser, address: str, **options: Any) -> Iterator[Page]:
    context = browser.new_context(**options)
    context.set_default_timeout(10_000)
    troubles: list[str] = []
    page = watched(context.new_page(), troubles)
    page.goto(address)
    yield page
    context.close()
    assert not troubles


@pytest.fixture(params=VIEWS, ids=lambda view: f"{view[0]}-{view[1]}")
def page(browser: Browser, address: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    width, scheme = request.param
    yield from open_page(browser, address, viewport={"width": width, "height": 844}, color_scheme=scheme)


@pytest.fixture
def wide(browser: Browser, address: str) -> Iterator[Page]:
    yield from open_page(browser, address, viewport={"width": 1280, "height": 844})


@pytest.fixture
def scriptless(browser: Browser, address: str) -> Iterator[Page]:
    yield from open_page(browser, address, viewport={"width": 390, "height": 844}, java_script_enabled=False)


def shown(page: Page) -> list[str]:
    return [str(cell.get_attribute("id")) for cell in page.locator("article:visible").all()]


def focused(page: Page) -> str:
    return str(page.evaluate("() => document.activeElement.getAttribute('href') ?? document.activeElement.id"))


def open_everything(page: Page) -> None:
    page.evaluate("() => document.querySelectorAll('details').forEach((some) => { some.open = true; })")


def test_no_cell_makes_the_page_scroll_sideways(page: Page, matrix: Matrix) -> None:
    open_everything(page)
    for fragment in ["", *(slug(square.cell.id) for square in matrix.squares)]:
        page.evaluate("(fragment) => { location.hash = fragment; }", fragment)
        assert page.evaluate(SIDEWAYS) == 0, fragment


def test_all_text_can_be_read(page: Page, matrix: Matrix) -> None:
    open_everything(page)
    for square in {square.verdict: square for square in matrix.squares}.values():
        page.evaluate("(fragment) => { location.hash = fragment; }", slug(square.cell.id))
        assert page.evaluate(FAINT) == [], square.cell.id


def test_a_click_opens_a_cell(page: Page) -> None:
    assert shown(page) == []
    page.locator(f".grid a[href='#{FAILED}']").click()
    assert page.evaluate("() => location.hash") == f"#{FAILED}"
    assert shown(page) == [FAILED]
    assert focused(page) == f"_{FAILED}"
    assert page.locator(".grid a[aria-current]").get_attribute("href") == f"#{FAILED}"
    top = page.locator("article:visible").bounding_box()
    assert top is not None and 0 <= top["y"] < 100  # it came into sight
    page.go_back()
    assert shown(page) == [] and page.locator(".grid a[aria-current]").count() == 0


def test_the_keyboard_is_enough(page: Page) -> None:
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert focused(page) == "#" + slug("vllm-0.6.3@cpu/cold_start[model=qwen2_vl]")
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)  # the first step leaps over a square that is not there
    assert focused(page) == f"#{FAILED}"
    page.keyboard.press("Enter")
    assert shown(page) == [FAILED] and focused(page) == f"_{FAILED}"
    page.keyboard.press("Tab")
    assert focused(page) == "#grid"  # from its heading on through the cell
    page.keyboard.press("Escape")
    assert shown(page) == [] and focused(page) == f"#{FAILED}"


def test_an_address_opens_its_cell(wide: Page, address: str) -> None:
    wide.goto("about:blank")
    wide.goto(f"{address}#{FAILED}")
    assert shown(wide) == [FAILED]
    assert "vllm-0.8.5@cpu multimodal_rollout[model=qwen2_vl]" in wide.locator("article:visible h2").inner_text()


def test_causes_and_other_versions_lead_to_their_cells(wide: Page) -> None:
    wide.locator(f".causes a[href='#{FAILED}']").first.click()
    assert shown(wide) == [FAILED]
    wide.locator("article:visible nav a").last.click()
    assert shown(wide) == [slug("vllm-0.10.0@cpu/multimodal_rollout[model=qwen2_vl]")]


def test_without_a_script_cells_open_all_the_same(scriptless: Page) -> None:
    scriptless.locator(f".grid a[href='#{FAILED}']").click()
    assert shown(scriptless) == [FAILED]
    scriptless.locator("article:visible summary", has_text="Traceback").click()
    assert scriptless.locator("article:visible pre", has_text="RuntimeError").first.is_visible()
    assert scriptless.locator("button").count() == 0  # what would do nothing is not there


def test_the_grid_scrolls_inside_itself_and_keeps_its_versions_in_sight(page: Page) -> None:
    grid = page.locator(".scroll:has(.grid)")
    narrow = page.evaluate("() => innerWidth < 600")
    assert grid.evaluate("(it) => it.scrollWidth > it.clientWidth") is narrow
    name = page.locator(".grid th[scope=row]").last
    grid.evaluate("(it) => { it.scrollLeft = 300; }")
    box = name.bounding_box()
    assert box is not None and 0 <= box["x"] < 40


def test_capabilities_scroll_inside_themselves_and_keep_their_names_in_sight(page: Page) -> None:
    table = page.locator(".scroll:has(.traits)")
    narrow = page.evaluate("() => innerWidth < 600")
    assert table.evaluate("(it) => it.scrollWidth > it.clientWidth") is narrow
    table.evaluate("(it) => { it.scrollLeft = 300; }")
    box = page.locator(".traits th[scope=row]").last.bounding_box()
    assert box is not None and 0 <= box["x"] < 40
    assert box["width"] < 0.6 * page.evaluate("() => innerWidth")  # and leave room for the signs


def test_a_capability_opens_to_the_words_of_the_engine(page: Page) -> None:
    words = page.locator(".traits p", has_text=sample_targets.NO_SLEEP)
    assert not words.is_visible()
    page.locator(".traits summary", has_text="sleep_mode").click()
    assert words.is_visible()
    assert page.evaluate(SIDEWAYS) == 0


def test_seven_targets_by_nine_columns_fit_a_laptop(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "full.html"
    path.write_text(html(sample.full(), Material(questions={}, excerpts={}), sample.NOW))
    for page in open_page(browser, path.as_uri(), viewport={"width": 1300, "height": 844}):
        open_everything(page)
        assert page.locator(".grid thead th[scope=col]").count() == 9
        for table in page.locator(".scroll").all():
            assert table.evaluate("(it) => it.scrollWidth - it.clientWidth") == 0
        assert page.evaluate(SIDEWAYS) == 0
        cut = "() => [...document.querySelectorAll('.square')].filter((it) => it.scrollWidth > it.clientWidth).length"
        assert page.evaluate(cut) == 0  # every square holds its words


def test_a_command_can_be_copied(wide: Page, address: str) -> None:
    wide.context.grant_permissions(["clipboard-read", "clipboard-write"])
    wide.goto(f"{address}#{FAILED}")
    button = wide.locator("article:visible .command button").first
    button.click()
    wide.locator("article:visible .command button", has_text="Copied").wait_for()
    assert wide.evaluate("() => navigator.clipboard.readText()") == (
        f"vllm-matrix repro 'vllm-0.8.5@cpu/multimodal_rollout[model=qwen2_vl]' --run {sample.RUN}"
    )


def test_a_log_opens_at_its_end(wide: Page) -> None:
    wide.locator(f".grid a[href='#{FAILED}']").click()
    wide.locator("article:visible summary", has_text="stderr.log").click()
    log = wide.locator("article:visible pre", has_text="load 100%")
    assert log.evaluate("(it) => it.scrollHeight > it.clientHeight && it.scrollTop > 0")


@pytest.mark.parametrize("width", [390, 1300])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_hung_cell_shows_its_ranks_and_stacks_at_once(
    browser: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    matrix = sample_hung.matrix()
    folder, suite = sample_hung.write(tmp_path, matrix)
    (folder / "matrix.html").write_text(html(matrix, gather(matrix, folder, suite), sample.NOW))
    here = f"{(folder / 'matrix.html').as_uri()}#{slug(sample_hung.HUNG)}"
    for page in open_page(browser, here, viewport={"width": width, "height": 844}, color_scheme=scheme):
        rows = page.locator("article:visible .ranks tbody tr")
        assert [row.locator("td.met").inner_text() for row in rows.all()] == ["in barrier 3", "never came to barrier 3"]
        stacks = page.locator("article:visible pre.stack")
        assert [stack.is_visible() for stack in stacks.all()] == [True, True, False]  # the two ranks', the engine first
        assert "torch_sdpa.py" in stacks.first.inner_text()
        assert stacks.first.evaluate("(it) => it.scrollTop") == 0  # the innermost call stands first
        table = page.locator("article:visible .scroll:has(.ranks)")
        assert table.evaluate("(it) => it.scrollWidth - it.clientWidth") == 0  # nobody has to look for who never came
        for fragment in ["", *(slug(square.cell.id) for square in matrix.squares)]:
            page.evaluate("(fragment) => { location.hash = fragment; }", fragment)
            open_everything(page)
            assert page.evaluate(SIDEWAYS) == 0, fragment
            assert page.evaluate(FAINT) == [], fragment
