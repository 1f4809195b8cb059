"""The page in a real browser."""

import base64
import io
import shutil

import pytest
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from tests.serving.conftest import behind_a_port, image

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
LOOKED = "canvas[data-map='rollout answer']"


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser, server, request):
    """The page on a screen; whatever it complains of, or fetches from elsewhere, is a failure."""
    context = browser.new_context(**getattr(request, "param", {}))
    found, troubles = context.new_page(), []
    found.on("pageerror", lambda error: troubles.append(str(error)))
    found.on(
        "request", lambda one: troubles.append(one.url) if is_foreign(one.url, server) else None
    )
    found.on("console", lambda said: troubles.append(said.text) if said.type == "error" else None)
    found.goto(server)
    expect(found.locator("#samples button").last).to_be_visible()
    yield found
    context.close()
    # The browser itself logs an answer of 4xx; what matters is that the page speaks of it.
    assert [one for one in troubles if "status of 422" not in one] == []


def is_foreign(url: str, server: str) -> bool:
    return not url.startswith((server, "data:", "blob:"))


def drawn(page: Page) -> bytes:
    """The pixels that are shown now."""
    url = page.evaluate("() => document.getElementById('canvas').toDataURL()")
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB").tobytes()


def looked(page: Page) -> None:
    """The answer and the first map are there."""
    page.wait_for_selector(LOOKED)
    expect(page.locator("#bars li")).to_have_count(5)
    expect(page.locator("#best")).to_contain_text("kind")
    expect(page.locator("#times")).to_contain_text("ms")


def choose(page: Page, data: bytes, name: str = "photo.png", kind: str = "image/png") -> None:
    with page.expect_file_chooser() as chooser:
        page.click("#choose")
    chooser.value.set_files({"name": name, "mimeType": kind, "buffer": data})


def hand_over(page: Page, event: str, data: bytes) -> None:
    """Drops or pastes a file."""
    page.evaluate(
        """([event, text]) => {
            const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
            const given = new DataTransfer();
            given.items.add(new File([bytes], "photo.png", { type: "image/png" }));
            const options = { bubbles: true, cancelable: true };
            const one = event === "paste"
                ? new ClipboardEvent(event, { ...options, clipboardData: given })
                : new DragEvent(event, { ...options, dataTransfer: given });
            document.body.dispatchEvent(one);
        }""",
        [event, base64.b64encode(data).decode()],
    )


def test_a_chosen_picture_gets_bars_and_an_overlay(page):
    expect(page.locator("#answer")).to_be_hidden()
    choose(page, image(size=(400, 300)))
    looked(page)
    over = drawn(page)
    page.click("label[for=view-image]")
    assert drawn(page) != over
    widths = page.evaluate("() => [...document.querySelectorAll('.bar i')].map(b => b.style.width)")
    shares = [float(width.rstrip("%")) for width in widths]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 100.01


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_a_picture_can_be_dropped_or_pasted(page, way):
    if way == "drop":
        hand_over(page, "dragenter", image())
        expect(page.locator(".veil")).to_be_visible()
    hand_over(page, way, image(size=(300, 200)))
    looked(page)
    expect(page.locator(".veil")).to_be_hidden()


def test_the_layer_slider_and_the_heads_change_the_overlay(page):
    choose(page, image(size=(300, 300)))
    looked(page)
    seen = {drawn(page)}
    page.focus("#layer")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("canvas[data-map='0 mean answer']")
    expect(page.locator("#caption")).to_contain_text("Layer 1, mean of its heads")
    seen.add(drawn(page))
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("canvas[data-map='1 mean answer']")
    seen.add(drawn(page))
    page.click("label[for=head-2]")
    page.wait_for_selector("canvas[data-map='1 2 answer']")
    seen.add(drawn(page))
    page.uncheck("#panes")
    seen.add(drawn(page))
    assert len(seen) == 5


def test_a_pane_that_is_pointed_at_shows_what_it_attends_to(page):
    choose(page, image(size=(300, 300)))
    looked(page)
    before = drawn(page)
    box = page.locator("#canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2 + 5, box["y"] + box["height"] / 2 + 5)
    page.wait_for_selector("canvas[data-map='rollout 10']")
    assert drawn(page) != before
    expect(page.locator("#caption")).to_contain_text("row 3, column 3")
    page.mouse.move(2, 2)
    page.wait_for_selector(LOOKED)
    assert drawn(page) == before


def test_arrow_keys_walk_over_the_panes(page):
    choose(page, image(size=(300, 300)))
    looked(page)
    page.focus("#canvas")
    page.keyboard.press("ArrowUp")
    page.wait_for_selector("canvas[data-map='rollout 6']")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("canvas[data-map='rollout 5']")
    page.keyboard.press("Escape")
    page.wait_for_selector(LOOKED)


def test_a_file_that_is_no_image_is_reported_in_a_sentence(page):
    choose(page, b"dear diary", "diary.txt", "text/plain")
    expect(page.locator("#alarm")).to_contain_text("diary.txt is not")
    expect(page.locator("#answer")).to_be_hidden()
    choose(page, image())
    looked(page)
    expect(page.locator("#alarm")).to_be_hidden()


def test_a_sample_is_one_click_and_names_its_author(page):
    page.click("#samples button[title^=daisy]")
    looked(page)
    expect(page.locator("#credit")).to_have_text("daisy: drawn by Vitrail")


def test_another_model_is_asked_at_once(page):
    choose(page, image())
    looked(page)
    with page.expect_request(lambda one: "/predict?model=second" in one.url):
        page.select_option("#model", "second")
    looked(page)


def test_the_page_says_where_the_picture_goes(page):
    expect(page.locator("#promise")).to_contain_text("this machine")


PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
DARK = {"color_scheme": "dark"}


@pytest.mark.parametrize("page", [PHONE, PHONE | DARK], indirect=True)
def test_a_phone_needs_no_sideways_scrolling_and_a_tap_chooses_a_pane(page):
    choose(page, image(size=(300, 300)))
    looked(page)
    assert page.evaluate("() => document.documentElement.scrollWidth") == 390
    box = page.locator("#canvas").bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] / 2 + 5, box["y"] + box["height"] / 2 + 5)
    page.wait_for_selector("canvas[data-map='rollout 10']")


@pytest.mark.parametrize("page", [DARK], indirect=True)
def test_dark_is_dark(page):
    color = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert max(int(part) for part in color[4:-1].split(",")) < 60


def test_a_token_is_asked_for_once(browser, model):
    with behind_a_port(model, token="s3cret") as address:
        context = browser.new_context()
        page = context.new_page()
        page.goto(address)
        expect(page.locator("#door")).to_be_visible()
        page.fill("#token", "s3cret")
        page.click("#door button")
        expect(page.locator("#samples button").first).to_be_visible()
        expect(page.locator("#door")).to_be_hidden()
        context.close()
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{address}/#token=s3cret")
        expect(page.locator("#samples button").first).to_be_visible()
        assert "token" not in page.url
        context.close()
