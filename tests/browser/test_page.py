"""The page as a person meets it: filters, a request's waterfall, the fleet, keys, and strangers' text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import Chromium, Page
from tests.browser.planted import HOSTILE, MESSAGE
from tests.browser.serving import ServedScene

pytestmark = pytest.mark.browser

_ROWS = "[...document.querySelectorAll('tr[data-go]')]"
_CONTRAST = """(() => {
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = rgba(getComputedStyle(node).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode()); ) {
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest(".skip, dialog, option, noscript")) continue;
    if (!parent.checkVisibility({ visibilityProperty: true })) continue;
    const [a, b] = [light(rgba(getComputedStyle(parent).color)), light(behind(parent))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), node.data.trim().slice(0, 40)]);
  }
  return found.sort((x, y) => x[0] - y[0]).slice(0, 5);
})()"""


def column(page: Page, number: int) -> list[str]:
    """The cells of one column of the list of requests, from 1."""
    return page.texts(f"tr[data-go] td:nth-child({number})")


def open_trace(page: Page, served: ServedScene, trace: str) -> None:
    """Go to one trace's view, by its address."""
    page.go(f"{served.url}/#/trace/{trace}")
    page.wait("document.querySelectorAll('[role=treeitem]').length > 0")


def test_recent_requests_are_listed_latest_first(page: Page, served: ServedScene) -> None:
    starts = page.evaluate(
        "fetch('api/requests?limit=100').then((a) => a.json()).then((a) => a.requests.map((r) => r.trace_id))"
    )
    assert page.evaluate(f"{_ROWS}.map((row) => row.querySelector('a').dataset.trace)") == starts
    assert starts[0] == served.scene.kept
    assert {"ok", "OVERLOADED", "cancelled"} <= set(column(page, 2))


def test_filter_by_tenant_keeps_its_requests_only_and_stands_in_the_address(page: Page) -> None:
    page.type("input[name=tenant]", "globex")
    page.wait(f"{_ROWS}.length > 0 && {_ROWS}.every((row) => row.cells[10].innerText === 'globex')")
    assert page.evaluate("location.hash") == "#/requests?tenant=globex"
    page.evaluate("location.reload()")
    page.wait(f"{_ROWS}.length > 0 && {_ROWS}.every((row) => row.cells[10].innerText === 'globex')")


def test_filters_combine_and_clear(page: Page, served: ServedScene) -> None:
    everything = len(column(page, 1))
    page.click("input[name=error]")
    page.type("input[name=replica]", "replica-0")
    page.wait(f"{_ROWS}.length === 1")
    assert page.evaluate(f"{_ROWS}[0].querySelector('a').dataset.trace") == served.scene.cancelled
    page.click("form.filters button")
    page.wait(f"{_ROWS}.length === {everything}")


def test_slow_filter_keeps_what_took_longer(page: Page, served: ServedScene) -> None:
    page.type("input[name=slow_ms]", "7000")
    page.wait(f"{_ROWS}.length === 1")
    assert page.evaluate(f"{_ROWS}[0].querySelector('a').dataset.trace") == served.scene.kept


def test_filter_that_nothing_matches_says_so(page: Page) -> None:
    page.type("input[name=tenant]", "nobody")
    page.wait("document.querySelector('main').innerText.includes('No recent request matches')")


def test_older_requests_come_on_demand_and_none_twice(page: Page) -> None:
    first = len(column(page, 1))
    assert first == 100
    page.wait("!document.querySelector('main > div > button').hidden")
    page.click("main > div > button")
    page.wait(f"{_ROWS}.length > {first}")
    ids = page.evaluate(f"{_ROWS}.map((row) => row.querySelector('a').dataset.trace)")
    assert len(ids) == len(set(ids))


def test_clicked_request_opens_its_waterfall_with_all_processes(page: Page, served: ServedScene) -> None:
    page.type("input[name=replica]", "replica-2")
    page.wait(f"{_ROWS}.length === 1")
    page.click("tr[data-go] td:nth-child(3)")
    page.wait("document.querySelectorAll('[role=treeitem]').length === 10")
    names = [
        name.split("\n")[0].lstrip("▾ ") for name in page.texts("[role=treeitem] .name .text:not(.where)")
    ]
    assert names == [
        "http.request", "router.request", "router.tokenize", "router.admit", "router.route", "router.forward",
        "replica.generate", "replica.queue", "replica.prefill", "replica.decode",
    ]  # fmt: skip
    assert page.evaluate("location.hash") == f"#/trace/{served.scene.whole}"
    assert "10 in 3 processes" in page.text("[aria-label=Summary]")


def test_bars_lie_within_their_parents_although_a_clock_is_behind(page: Page, served: ServedScene) -> None:
    open_trace(page, served, served.scene.whole)
    bars = page.evaluate(
        "[...document.querySelectorAll('[role=treeitem]')].map((row) => {"
        " const b = row.querySelector('.bar').getBoundingClientRect();"
        " return [Number(row.getAttribute('aria-level')), b.left, b.right]; })"
    )
    above: list[Any] = []
    for level, left, right in bars:
        above = above[: level - 1]
        if above:
            assert above[-1][0] - 1 <= left
            assert right <= above[-1][1] + 3  # a bar is two pixels wide at least
        above.append((left, right))
    assert "Clocks differ: 4 spans of 1 host" in page.text(".note")
    assert len(page.texts(".fall .chip")) == 4


def test_first_and_last_token_are_marked(page: Page, served: ServedScene) -> None:
    open_trace(page, served, served.scene.whole)
    first, last = page.texts(".axis.marks span")
    assert first == "TTFT 195 ms"
    assert last.startswith("last token · TPOT 11.2 ms")
    edges = page.evaluate(
        "(() => { const all = (s) => [...document.querySelectorAll(s)];"
        " const boxes = (s) => all(s).map((e) => e.getBoundingClientRect());"
        " return [...boxes('.grid .mark').map((b) => b.left),"
        " ...boxes('.bar.c-decode').flatMap((b) => [b.left, b.right])]; })()"
    )
    assert edges[0] == pytest.approx(edges[2], abs=4)
    assert edges[1] == pytest.approx(edges[3], abs=4)


def test_routing_decision_shows_each_candidate_with_its_terms(page: Page, served: ServedScene) -> None:
    open_trace(page, served, served.scene.whole)
    rows = page.evaluate(
        "[...document.querySelectorAll('[aria-label=\"Routing decision\"] tbody tr')]"
        ".map((r) => [...r.cells].map((c) => c.innerText.trim()))"
    )
    assert rows[0][:11] == [
        "replica-2 chosen",
        "304",
        "0",
        "0",
        "208",
        "18.0",
        "43.7",
        "0.0",
        "3.1",
        "1.4",
        "66.2",
    ]
    assert [row[0] for row in rows if len(row) > 1] == ["replica-2 chosen", "replica-0", "replica-1"]
    assert "no cache credit: unsynced: a gap in its updates" in rows[-1][0]
    assert "predicted-time" in page.text('[aria-label="Routing decision"] h2')


def test_linked_engine_steps_are_shown_by_rank(page: Page, served: ServedScene) -> None:
    open_trace(page, served, served.scene.whole)
    rows = page.evaluate(
        "[...document.querySelectorAll('[aria-label=\"Engine steps\"] tbody tr')]"
        ".map((r) => [r.cells[0].innerText, r.cells[1].innerText])"
    )
    assert sorted(rows) == [["4,711", "0"], ["4,711", "1"], ["4,712", "0"], ["4,712", "1"]]


def test_retried_request_shows_both_attempts_and_why(page: Page, served: ServedScene) -> None:
    open_trace(page, served, served.scene.retried)
    assert MESSAGE in page.text(".note")
    assert "2 attempts" in page.text("[aria-label=Summary]")
    assert "attempt 2" in " ".join(page.texts("[role=treeitem] .chip"))
    assert len(page.texts('[aria-label="Routing decision"] tbody tr')) == 3


def test_refused_and_kept_requests_say_what_happened(page: Page, served: ServedScene) -> None:
    open_trace(page, served, served.scene.refused)
    assert "OVERLOADED: 64 requests wait" in page.text(".note.error")
    open_trace(page, served, served.scene.kept)
    page.wait("document.querySelector('.note')?.innerText.includes('because it was slow')")


def test_unknown_trace_is_no_error(page: Page, served: ServedScene) -> None:
    page.go(f"{served.url}/#/trace/{'0' * 32}")
    page.wait("document.querySelector('main').innerText.includes('No trace')")
    assert page.text("#pulse") == "live"


def test_keyboard_alone_filters_opens_walks_folds_and_returns(page: Page, served: ServedScene) -> None:
    page.press("/")
    page.send("Input.insertText", text="acme")
    page.wait(f"{_ROWS}.length > 0 && {_ROWS}.every((row) => row.cells[10].innerText === 'acme')")
    page.press("Escape", "ArrowDown", "j", "k", "Enter")
    page.wait("document.querySelectorAll('[role=treeitem]').length > 0")
    page.press("j")
    assert page.evaluate("document.activeElement.getAttribute('aria-level')") == "1"
    page.press("ArrowDown")
    second = page.evaluate("document.activeElement.dataset.span")
    assert page.evaluate("document.querySelector('[aria-selected=true]').dataset.span") == second
    page.press("ArrowUp", "ArrowLeft")
    assert len(page.texts("[role=treeitem]")) == 1
    page.press("ArrowRight")
    assert len(page.texts("[role=treeitem]")) == 3
    page.press("ArrowDown", "z")
    page.wait("!document.querySelector('[aria-label=Waterfall] .head button').hidden")
    page.press("z", "Escape")
    page.wait(f"{_ROWS}.length > 0")
    assert page.evaluate("location.hash") == "#/requests?tenant=acme"


def test_chosen_span_shows_its_attributes_and_events(page: Page, served: ServedScene) -> None:
    open_trace(page, served, served.scene.whole)
    page.click("[role=treeitem]:nth-child(10)")
    side = page.text("aside")
    assert "kvorum.replica.decode" in side
    assert "kvorum.first_token" in side
    assert "moved by" in side


def test_strangers_text_is_shown_as_text_and_never_run(page: Page, served: ServedScene) -> None:
    assert HOSTILE[:36] in " ".join(column(page, 2))
    open_trace(page, served, served.scene.hostile)
    page.click("[role=treeitem]:nth-child(2)")
    side = page.text("aside")
    assert "<script>window.hacked='yes'</script>" in side
    assert "javascript:window.hacked='yes'" in side
    assert "\u202e" not in page.text("main")
    page.go(f"{served.url}/#/requests?tenant={HOSTILE}&replica={HOSTILE}&slow_ms=<b>1</b>")
    page.wait("document.querySelector('#pulse').innerText === 'live'")
    page.go(f"{served.url}/#/trace/{HOSTILE}")
    page.wait("document.querySelector('main').innerText.includes('No trace')")
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert (
        page.evaluate("document.querySelectorAll('main img, main script, main iframe, [onerror]').length")
        == 0
    )
    assert page.evaluate("[...document.links].every((link) => link.protocol === 'http:')")


def test_policy_stops_a_script_that_got_into_the_page(browser: Chromium, served: ServedScene) -> None:
    tab = browser.open(served.url)
    tab.evaluate(
        "(() => { const s = document.createElement('script');"
        " s.textContent = 'window.hacked = 1'; document.body.append(s);"
        " document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked = 2\">'); })()"
    )
    tab.wait("document.querySelector('img').complete")
    assert tab.evaluate("typeof window.hacked") == "undefined"
    assert tab.reported("Log.entryAdded", lambda said: "Content Security Policy" in said["entry"]["text"])
    tab.close()


def test_all_comes_from_the_viewer_itself(page: Page, served: ServedScene) -> None:
    page.go(f"{served.url}/#/fleet")
    page.wait("document.querySelector('.tiles') !== null")
    asked = [params["request"]["url"] for params in page.reported("Network.requestWillBeSent")]
    assert len(asked) > 5
    assert {url for url in asked if not url.startswith((served.url, "data:"))} == set()


def test_fleet_shows_replicas_routers_and_latencies(page: Page, served: ServedScene) -> None:
    page.click("nav a[data-view=fleet]")
    page.wait("document.querySelectorAll('[aria-label=Replicas] tbody tr').length >= 3")
    table = page.text("[aria-label=Replicas]")
    for shown in (
        "replica-0",
        "91 %",
        "62 %",
        "draining",
        "degraded",
        "shard 1 of replica-1 ended",
        "9.70 ms",
    ):
        assert shown in table
    assert "2 / 3" in page.text(".tiles")
    routers = page.text("[aria-label=Routers]")
    assert "predicted-time" in routers
    assert "no answer: connection refused" in routers


def test_fleet_follows_what_changes(page: Page, served: ServedScene) -> None:
    page.go(f"{served.url}/#/fleet")
    page.wait("document.querySelector('.tiles')?.innerText.includes('2 / 3')")
    served.fleet["replicas"][1]["state"] = "READY"
    try:
        page.wait("document.querySelector('.tiles').innerText.includes('3 / 3')")
    finally:
        served.fleet["replicas"][1]["state"] = "DRAINING"


def test_lost_viewer_is_named_and_found_again(page: Page) -> None:
    page.offline(True)
    page.wait("document.querySelector('#pulse').innerText.includes('no answer since')")
    assert len(column(page, 1)) == 100
    page.offline(False)
    page.wait("document.querySelector('#pulse').innerText === 'live'")


def test_pause_stops_asking(page: Page) -> None:
    page.press("p")
    page.wait("document.querySelector('#pulse').innerText === 'paused'")
    asked = len(page.reported("Network.requestWillBeSent"))
    page.evaluate("new Promise((done) => setTimeout(done, 4500))")
    assert len(page.reported("Network.requestWillBeSent")) <= asked + 2  # a round that was under way


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("view", ["requests", "trace", "fleet"])
def test_text_stands_out_from_what_is_behind_it(
    page: Page, served: ServedScene, view: str, dark: bool
) -> None:
    page.dark(dark)
    page.go(f"{served.url}/#/{'trace/' + served.scene.whole if view == 'trace' else view}")
    page.wait("document.querySelectorAll('.panel').length > 0")
    least = page.evaluate(_CONTRAST)
    assert least[0][0] >= 4.5, least


@pytest.mark.parametrize("width", [390, 1024, 1920])
def test_page_does_not_overflow_sideways(page: Page, served: ServedScene, width: int) -> None:
    page.size(width, 900)
    for view in ("requests", f"trace/{served.scene.whole}", "fleet"):
        page.go(f"{served.url}/#/{view}")
        page.wait("document.querySelectorAll('.panel').length > 0")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


def test_theme_is_chosen_and_remembered(page: Page) -> None:
    page.dark(False)
    page.click("#theme")
    page.click("#theme")
    assert page.text("#theme") == "Theme: dark"
    page.evaluate("window.beforeReload = true, location.reload()")
    page.wait(
        "!window.beforeReload && document.readyState === 'complete'"
        " && document.querySelector('#theme').innerText === 'Theme: dark'"
    )
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
    page.evaluate("localStorage.clear()")


def test_key_opens_the_page_once_and_leaves_the_address(browser: Chromium, tmp_path: Path) -> None:
    with ServedScene(tmp_path, key_digests=(hashlib.sha256(b"secret").hexdigest(),)) as locked:
        tab = browser.open(locked.url)
        assert "key" in tab.text("body")
        tab.go(f"{locked.url}/?key=secret")
        tab.wait("document.querySelectorAll('tr[data-go]').length > 0")
        assert "secret" not in tab.evaluate("location.href")
        assert "secret" not in json.dumps(tab.evaluate("document.cookie"))
        tab.close()
