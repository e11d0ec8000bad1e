"""These tests make namespaces and Ray nodes: only where somebody asked for it and the machine allows it."""

from __future__ import annotations

import os

import pytest

from tests.lab.lab import missing

OPT_IN = "KVORUM_LAB"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lab: needs emulated hosts (root, iproute2, KVORUM_LAB=1)")


@pytest.fixture(scope="session", autouse=True)
def _allowed() -> None:
    if os.environ.get(OPT_IN) != "1":
        pytest.skip(f"emulated hosts are made only with {OPT_IN}=1")
    if reason := missing():
        pytest.skip(reason)
