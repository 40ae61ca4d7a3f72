"""A headless Chromium through its driver, for tests of pages and for their pictures."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def missing_browser() -> str | None:
    """Why no browser can be driven here; None: one can."""
    for name in ("chromium", "chromedriver"):
        if shutil.which(name) is None:
            return f"there is no {name}: install the distribution's chromium and chromium-driver"
    return None


class Browser:
    """One tab. Sizes in CSS pixels."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, width: int, height: int = 1000, dark: bool = False) -> None:
        """Load a page in a window of that size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": theme})
        self.driver.get(url)

    def run(self, script: str) -> Any:
        """Run a script's body, and return what it returns."""
        return self.driver.execute_script(script)

    def wait(self, script: str, timeout_s: float = 15.0) -> Any:
        """Wait until a script's body returns something true, and return that."""
        from selenium.webdriver.support.ui import WebDriverWait

        until: Callable[[Any], Any] = lambda driver: driver.execute_script(script)  # noqa: E731
        return WebDriverWait(self.driver, timeout_s, 0.1).until(until, script)

    def complaints(self) -> list[str]:
        """What the console has said since the last call: errors and warnings, of the page's policy too."""
        return [f"{one['level']}: {one['message']}" for one in self.driver.get_log("browser")]

    def shoot(self, file: Path) -> None:
        """Write a picture of the window."""
        file.parent.mkdir(parents=True, exist_ok=True)
        assert self.driver.save_screenshot(str(file))


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a headless browser for the duration of the context."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
