"""The planted scene in a viewer, to look at: python -m tests.browser.show [--screenshots FOLDER]"""

from __future__ import annotations

import argparse
import signal
import tempfile
from pathlib import Path

from tests.browser import chromium
from tests.browser.chromium import Chromium
from tests.browser.serving import ServedScene

_VIEWS = ("requests", "fleet", "whole", "retried", "refused", "kept", "hostile")


def main() -> None:
    """Serve until Ctrl-C, or take pictures of every view in light and dark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER", help="write PNG files there, and end")
    folder: Path | None = parser.parse_args().screenshots
    with tempfile.TemporaryDirectory() as scratch, ServedScene(Path(scratch)) as served:
        if folder is None:
            print(f"{served.url} (Ctrl-C ends it)", flush=True)
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
            return
        program = chromium.installed()
        if program is None:
            parser.error(f"no browser: `make setup-browser`, or any of {', '.join(chromium.NAMES)}")
        folder.mkdir(parents=True, exist_ok=True)
        with Chromium(program) as browser:
            shoot(browser, served, folder)


def shoot(browser: Chromium, served: ServedScene, folder: Path) -> None:
    """One file a view and theme."""
    page = browser.open(served.url)
    for dark in (False, True):
        page.dark(dark)
        for view in _VIEWS:
            trace = getattr(served.scene, view, None)
            page.go(f"{served.url}/#/{'trace/' + trace if trace else view}")
            page.wait("document.querySelector('.panel') && document.querySelector('#cluster').innerText")
            if view == "fleet":  # two rounds later there is a rate and a line
                page.evaluate("new Promise((done) => setTimeout(done, 4500))")
            if view == "whole":
                page.click("[role=treeitem]:nth-child(9)")
            path = folder / f"{view}-{'dark' if dark else 'light'}.png"
            page.screenshot(path)
            print(path, flush=True)
    page.close()


if __name__ == "__main__":
    main()
