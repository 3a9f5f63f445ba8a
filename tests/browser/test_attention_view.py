"""The attention view in a browser: it shows the weights that it was made from."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import sentence_weights
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from transformer_jax.decoding.attention_view import attention_view

pytestmark = pytest.mark.long

SOURCE = ["▁I", "▁have", "▁read", "▁the", "▁book", "</s>"]
TARGET = ["▁ich", "▁habe", "▁das", "▁Buch", "▁gelesen", "<b>", "</s>"]

WEIGHTS = sentence_weights(SOURCE, TARGET, layers=2, heads=3)
SIDES = {
    "encoder": (WEIGHTS.source, WEIGHTS.source),
    "decoder": (WEIGHTS.outputs, WEIGHTS.inputs),
    "cross": (WEIGHTS.outputs, WEIGHTS.source),
}


@pytest.fixture
def view(browser: Any, tmp_path: Path) -> Any:
    page = tmp_path / "view.html"
    page.write_text(attention_view(WEIGHTS), "utf-8")
    browser.show(page.as_uri())
    yield browser
    assert browser.errors() == []
    assert browser.hosts() == set()


def choose(browser: Any, attention: str, layer: int, head: int | str) -> np.ndarray:
    """Chooses by the three menus. Returns the weights that are to be shown."""
    for name, value in (("attention", attention), ("layer", layer), ("head", head)):
        Select(browser.driver.find_element(By.ID, name)).select_by_value(str(value))
    weights = WEIGHTS.layers[attention][layer]
    return weights.mean(0) if head == "mean" else weights[int(head)]


def shown(browser: Any) -> dict[str, float]:
    """The tokens and the weights that the page says."""
    said = browser.driver.find_element(By.ID, "said").text.partition(" attends to ")[2]
    pairs = (part.rsplit(" ", 1) for part in said.split(", "))
    return {token: float(weight) for token, weight in pairs}


@pytest.mark.parametrize("attention", SIDES)
@pytest.mark.parametrize(("layer", "head"), [(0, 0), (1, 2), (1, "mean")])
def test_a_click_shows_the_weights(view: Any, attention: str, layer: int, head: int | str) -> None:
    weights = choose(view, attention, layer, head)
    rows, keys = SIDES[attention]
    for i in (0, len(rows) - 1):
        token = view.driver.find_elements(By.CSS_SELECTOR, "#rows button")[i]
        assert token.text == rows[i]
        token.click()
        best = np.argsort(-weights[i])[:5].tolist()
        assert shown(view) == {keys[k]: pytest.approx(weights[i, k], abs=0.0006) for k in best}
        lines = view.driver.find_elements(By.CSS_SELECTOR, "svg line")
        opacity = sorted(float(re.findall(r"[\d.]+", x.get_attribute("style"))[0]) for x in lines)
        wanted = sorted(weight for weight in weights[i].tolist() if weight >= 0.02)
        np.testing.assert_allclose(opacity, wanted, atol=1e-4)


def test_the_keyboard_is_enough(view: Any) -> None:
    """Tab reaches each menu and token; arrows choose; Enter keeps a token."""
    body = view.driver.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.TAB)
    for name, keys in (("attention", Keys.ARROW_UP), ("layer", Keys.ARROW_UP), ("head", "1")):
        focused = view.driver.switch_to.active_element
        assert focused.get_attribute("id") == name
        focused.send_keys(keys, Keys.TAB)
    chosen = {
        name: view.driver.find_element(By.ID, name).get_attribute("value")
        for name in ("attention", "layer", "head")
    }
    assert chosen == {"attention": "decoder", "layer": "0", "head": "1"}
    token = view.driver.switch_to.active_element
    assert token.text == TARGET[0]
    weights = WEIGHTS.layers["decoder"][0][1]
    assert max(shown(view).values()) == pytest.approx(weights[0].max(), abs=0.0006)
    token.send_keys(Keys.ENTER)
    assert token.get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(view: Any, scheme: str) -> None:
    view.show(view.driver.current_url, 360, scheme)
    assert not view.is_too_wide()
    weights = choose(view, "cross", 0, 1)
    view.driver.find_elements(By.CSS_SELECTOR, "#rows button")[2].click()
    assert max(shown(view).values()) == pytest.approx(weights[2].max(), abs=0.0006)
