"""A browser, and the built site as a reader sees it."""

import functools
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

SITE = Path(__file__).parents[2] / "build" / "site"

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars"),
)


class Browser:
    """Chromium with what tests ask of it."""

    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options, Service(str(shutil.which("chromedriver"))))
        self.driver.implicitly_wait(10)

    def show(self, address: str, width: int = 1280, scheme: str = "light") -> None:
        """Opens a page in a window of this width, in light or dark colors."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        colors = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", colors)
        self.driver.get(address)

    def errors(self) -> list[str]:
        """Returns what the console has said since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def hosts(self) -> set[str | None]:
        """Returns the hosts that pages have asked for anything since the last call."""
        log = self.driver.get_log("performance")
        events = (json.loads(entry["message"])["message"] for entry in log)
        requests = (e["params"] for e in events if e["method"] == "Network.requestWillBeSent")
        urls = (urlsplit(each["request"]["url"]) for each in requests)
        return {url.hostname for url in urls if url.scheme in ("http", "https", "ws", "wss")}

    def is_too_wide(self) -> bool:
        """Returns whether a reader must scroll the page to the right."""
        return self.driver.execute_script(
            "return document.documentElement.scrollWidth > window.innerWidth"
        )


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}; Debian's packages are chromium and chromium-driver")
    chromium = Browser(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.driver.quit()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    """The address of the built site."""
    if not SITE.exists():
        pytest.skip("needs build/site; run `make docs`")
    handler = functools.partial(QuietHandler, directory=str(SITE))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
