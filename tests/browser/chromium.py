"""A headless Chromium on a file, in a colour scheme and a width, without any network."""

import base64
import json
import shutil
from contextlib import contextmanager
from importlib.util import find_spec

PHONE, DESK = 390, 1280  # CSS pixels across
_HEIGHT = 844
_MOST_HEIGHT = 16_000


def missing():
    """Why no browser can be started here; None where one can."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed: run tests/browser/install.sh"
    return None if find_spec("selenium") else "selenium is not installed: make setup"


class Tab:
    """One page in a browser of its own."""

    def __init__(self, driver):
        self.driver = driver

    def run(self, script, *arguments):
        """Run a script in the page; return its result."""
        return self.driver.execute_script(script, *arguments)

    def console(self):
        """The page's console messages since the last call, refused requests included."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        """Every address asked for since the last call, whether or not it was answered."""
        entries = (json.loads(entry["message"]) for entry in self.driver.get_log("performance"))
        messages = [entry["message"] for entry in entries]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def picture(self, height=None):
        """A PNG of the page from its top, whole where no height is given."""
        size = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": min(height or size[1], _MOST_HEIGHT)}
        options = {"captureBeyondViewport": True, "clip": clip | {"scale": 1}}
        found = self.driver.execute_cdp_cmd("Page.captureScreenshot", options)
        return base64.b64decode(found["data"])


@contextmanager
def opened(page, scheme, width):
    """The page as a person with that scheme and that width sees it; a phone where it is narrow."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    words = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    for word in (*words, f"--window-size={max(width, 500)},{_HEIGHT}", "--hide-scrollbars"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(shutil.which("chromedriver") or "")
    driver = webdriver.Chrome(options=options, service=service)
    try:
        say = driver.execute_cdp_cmd
        say("Network.enable", {})
        limits = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        say("Network.emulateNetworkConditions", limits)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        say("Emulation.setEmulatedMedia", {"features": features})
        device = {"width": width, "height": _HEIGHT, "deviceScaleFactor": 1, "mobile": width < 500}
        say("Emulation.setDeviceMetricsOverride", device)
        driver.get(page.as_uri())
        yield Tab(driver)
    finally:
        driver.quit()
