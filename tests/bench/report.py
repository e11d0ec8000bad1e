"""How every benchmark reports: a table of both sides, and bench-results/NAME.json."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 220
ROOT = Path(__file__).resolve().parents[2]


def report(
    name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], figures: Mapping[str, float]
) -> None:
    """Print the table and the figures; write the figures with the machine and the commit."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for figure, value in figures.items():
        console.print(f"{figure} = {value:.4g}", highlight=False)
    folder = ROOT / "bench-results"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    content = {"figures": dict(figures), "machine": machine(), "commit": commit()}
    path.write_text(json.dumps(content, indent=2) + "\n")
    console.print(f"written to {path.relative_to(ROOT)}", highlight=False)


def machine() -> dict[str, str | int | float]:
    """What a reader needs to compare figures."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": psutil.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m_at_end": round(psutil.getloadavg()[0], 2),
    }


def commit() -> str:
    """The commit, marked when the tree has changes."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
