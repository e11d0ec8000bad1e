"""A real viewer over a store with the planted scene, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any, Self

from telemetry.store import SpanStore
from telemetry.viewer.server import Viewer
from telemetry.viewer.settings import ViewerSettings
from tests.browser import planted

_START_S = 20.0


class ServedScene:
    """A viewer at `url` until the block ends. The fleet it shows is `fleet`, which may be changed."""

    def __init__(self, folder: Path, *, key_digests: tuple[str, ...] = ()) -> None:
        self.scene = planted.scene(time.time() * 1e3)
        self.fleet: dict[str, Any] = planted.fleet()
        self.store = SpanStore(folder / "traces.db")
        self.store.write(self.scene.spans)
        self._settings = ViewerSettings(http_port=0, key_digests=key_digests)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._viewer = Viewer(self._settings, store=self.store, fleet=self._fleet, scrape=None)
        addresses = asyncio.run_coroutine_threadsafe(self._viewer.start(), self._loop).result(_START_S)
        self.url = addresses.http if addresses.http.startswith("http") else f"http://{addresses.http}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._viewer.stop(), self._loop).result(_START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.store.close()

    async def _fleet(self) -> dict[str, Any]:
        return self.fleet
