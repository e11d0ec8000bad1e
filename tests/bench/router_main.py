"""A router as `kvorum router` runs it, for measuring: prints its address, ends on SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from router.config import RouterConfig
from router.main import run, serve
from telemetry.config import TelemetryConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("controller")
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    parser.add_argument("--trace-store", type=Path)
    arguments = parser.parse_args()
    config = RouterConfig(port=0)
    telemetry = TelemetryConfig(enabled=arguments.trace_store is not None, store_path=arguments.trace_store)

    def on_ready(address: str) -> None:
        print(address, flush=True)

    if arguments.loop == "uvloop":
        serve(config, arguments.controller, telemetry=telemetry, on_ready=on_ready)
    else:
        asyncio.run(run(config, arguments.controller, telemetry=telemetry, on_ready=on_ready))


if __name__ == "__main__":
    main()
