"""The site in a browser: search, mathematics, widths, and no request that leaves it."""

from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from transformer_jax.decoding.beam import beam_search

PAGES = (
    *("docs/index", "docs/attention", "docs/decoding", "docs/results", "docs/reference/decoding"),
    *("notebooks/02_kinds_of_attention", "genindex"),
)
"""Pages with formulas, pictures, wide tables, outputs of cells, or much code."""

pytestmark = pytest.mark.long

# Resolves with the number of formulas and the number of those that MathJax has drawn.
FORMULAS = """
const done = arguments[0];
const count = () => ["span.math, div.math", "mjx-container > svg"].map(
  (chosen) => document.querySelectorAll(chosen).length);
const ready = window.MathJax ? window.MathJax.startup.promise : Promise.resolve();
ready.then(() => done(count()));
"""

BROKEN_IMAGES = """
return [...document.images].filter((image) => image.complete && !image.naturalWidth)
  .map((image) => image.src)
"""


def test_search_finds_a_function(browser: Any, site: str) -> None:
    browser.show(f"{site}/index.html")
    WebDriverWait(browser.driver, 10).until(lambda driver: "docs/index" in driver.current_url)
    box = browser.driver.find_element(By.CSS_SELECTOR, "input[name=q]")
    box.send_keys("beam_search", Keys.ENTER)
    name = f"{beam_search.__module__}.{beam_search.__name__}"
    browser.driver.find_element(By.PARTIAL_LINK_TEXT, name).click()
    assert browser.driver.current_url.endswith(f"decoding.html#{name}")
    entry = browser.driver.find_element(By.ID, name)
    assert entry.is_displayed()
    assert "beams" in entry.text
    assert browser.errors() == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_whole(browser: Any, site: str, page: str) -> None:
    """At both widths: no request leaves the site, and the console says nothing."""
    for width, scheme in ((1280, "light"), (390, "dark")):
        browser.show(f"{site}/{page}.html", width, scheme)
        formulas, drawn = browser.driver.execute_async_script(FORMULAS)
        assert formulas == drawn
        assert drawn > 0 or page not in ("docs/attention", "docs/decoding")
        assert browser.driver.execute_script(BROKEN_IMAGES) == []
        assert not browser.is_too_wide()
        assert browser.errors() == []
        assert browser.hosts() <= {"127.0.0.1"}
