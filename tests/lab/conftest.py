"""These tests make namespaces and Ray nodes: only where somebody asked for it and the machine allows it."""

from __future__ import annotations

import os

import pytest

from tests.lab.lab import missing

OPT_IN = "KVORUM_LAB"


@pytest.fixture(scope="session", autouse=True)
def _allowed() -> None:
    if os.environ.get(OPT_IN) != "1":
        pytest.skip(f"emulated hosts are made only with {OPT_IN}=1")
    if reason := missing():
        pytest.skip(reason)
