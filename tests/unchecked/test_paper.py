"""All experiments of the paper at the smallest scale, and their pages in a browser."""

import shutil
from pathlib import Path

import pytest

from vitrail.reproduction.paper import paper

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def rendered(pages: list[Path]) -> dict[str, dict]:
    """What a browser makes of pages: errors, width, and the number of charts and tables."""
    playwright = pytest.importorskip("playwright.sync_api")
    found = {}
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        errors: list[str] = []
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        for path in pages:
            page.goto(path.as_uri())
            found[path.name] = {
                "errors": errors[:],
                "width": page.evaluate("document.documentElement.scrollWidth"),
                "title": page.inner_text("h1"),
                # Text beside which nothing else fits is not squeezed into a narrow column.
                "narrowest": min(
                    (
                        box["width"]
                        for one in page.locator(".scores small").all()
                        if (box := one.bounding_box())
                    ),
                    default=390,
                ),
                "charts": page.locator(".chart svg").count(),
                "rows": page.locator("tbody tr").count(),
                "claims": page.locator(".claim").count(),
                "images": page.evaluate(
                    "[...document.images].map(image => image.complete && image.naturalWidth > 0)"
                ),
            }
            errors.clear()
        browser.close()
    return found


def test_all_experiments_run_and_every_page_renders(tmp_path):
    out = tmp_path / "study"
    result = paper(["all"], scale="smoke", out=out, device="cpu")
    experiments = result["experiments"]
    assert len(experiments) == 15
    assert result["failures"] == []
    for one in experiments:
        assert one["done"] == one["tasks"] > 0
        for claim in one["claims"]:
            assert claim["verdict"] in ("held", "not held", "undecided"), claim
            assert all("not measured" not in line for line in claim["evidence"])
    scoreboard = (out / "README.md").read_text()
    assert all(claim["claim"] in scoreboard for one in experiments for claim in one["claims"])
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    pages = rendered([out / "index.html", *(Path(one["page"]) for one in experiments)])
    assert pages["index.html"]["rows"] == sum(len(one["claims"]) for one in experiments)
    for name, page in pages.items():
        assert page["errors"] == [], name
        assert page["width"] <= 390, name
        assert all(page["images"]), name
        assert page["narrowest"] > 100, name
    for one in experiments:
        page = pages[Path(one["page"]).name]
        assert page["title"] == one["title"]
        assert page["claims"] == len(one["claims"])
        # Every cell in the two tables, and every run.
        assert page["rows"] >= 2
    assert pages["figure5.html"]["charts"] == 2  # the paper's and ours
    assert pages["figure9.html"]["charts"] == 1
    assert len(pages["figure7.html"]["images"]) == 8
