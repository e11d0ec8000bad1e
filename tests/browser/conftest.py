"""A browser and a viewer for all tests here, which are skipped where there is no browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser import chromium
from tests.browser.chromium import Chromium, Page
from tests.browser.serving import ServedScene


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    program = chromium.installed()
    if program is None:
        pytest.skip(f"no browser: `make setup-browser`, or any of {', '.join(chromium.NAMES)} on the PATH")
    with Chromium(program) as started:
        yield started


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedScene]:
    with ServedScene(tmp_path_factory.mktemp("viewer")) as viewer:
        yield viewer


@pytest.fixture
def page(browser: Chromium, served: ServedScene) -> Iterator[Page]:
    """A tab at the list of requests. No test may leave a complaint of the browser behind."""
    tab = browser.open(served.url)
    tab.wait("document.querySelectorAll('tr[data-go]').length > 0")
    yield tab
    thrown, refused = tab.reported("Runtime.exceptionThrown"), tab.reported("Log.entryAdded", _is_policy)
    tab.close()
    assert thrown == []
    assert refused == []


def _is_policy(params: dict[str, dict[str, str]]) -> bool:
    return "Content Security Policy" in params["entry"]["text"]
