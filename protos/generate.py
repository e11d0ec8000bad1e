"""Generate the Python stubs: `python protos/generate.py [OUT]`, OUT defaulting to the repository root."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc_tools  # type: ignore[import-untyped]
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def main(out: str) -> int:
    bundled = Path(grpc_tools.__file__).parent / "_proto"
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "protos").glob("*.proto"))
    flags = [f"-I{ROOT}", f"-I{bundled}", f"--python_out={out}", f"--grpc_python_out={out}"]
    # mypy-protobuf types the services too, with separate async stubs.
    beside = Path(sys.executable).parent  # the plugins are console scripts of this environment
    for plugin in ("mypy", "mypy_grpc"):
        flags += [
            f"--plugin=protoc-gen-{plugin}={beside / f'protoc-gen-{plugin}'}",
            f"--{plugin}_out=quiet:{out}",
        ]
    return int(protoc.main(["protoc", *flags, *sources]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1] if len(sys.argv) > 1 else str(ROOT)))
