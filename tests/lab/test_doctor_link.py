"""`kvorum doctor` names a slow link between the shards of a replica that does not overlap AllReduce."""

from __future__ import annotations

import json
import sys

import pytest

from tests.lab.lab import Lab
from tests.lab.ray_nodes import start_ray

pytestmark = [pytest.mark.lab, pytest.mark.cluster, pytest.mark.timeout(600)]

_KVORUM = [sys.executable, "-m", "cluster.cli"]
_STATE = {"KVORUM_STATE_DIR": "/tmp/state"}
_UP_TIMEOUT_S = 400
_RATE = "500mbit"
_FLAGS = (
    "--no-http", "--port", "0", "--detach", "--max-model-len", "2048", "--replicas", "1",
    "--tensor-parallel-size", "2", "--placement", "spread", "--overlap", "off",
)  # fmt: skip


def test_a_slow_link_with_overlap_off_is_named() -> None:
    with Lab(2, _RATE) as lab:
        nodes, head = start_ray(lab), lab.hosts[0]
        head.run([*_KVORUM, "up", *_FLAGS, "--ray-address", nodes.address], _STATE, timeout_s=_UP_TIMEOUT_S)
        for number in range(4):
            prompt = " ".join(f"word{number}-{place}" for place in range(150))
            head.run(
                [*_KVORUM, "generate", prompt, "--max-tokens", "4", "--ignore-eos"], _STATE, timeout_s=60
            )
        shown = json.loads(head.run([*_KVORUM, "doctor", "--json"], _STATE, timeout_s=60).stdout)
        head.run([*_KVORUM, "down", "--grace", "1"], _STATE, timeout_s=90)
    assert shown["summary"]["requests"] == 4
    finding = shown["findings"][0]
    assert finding["cause"] == "exposed-communication"
    assert finding["change"].startswith("--overlap off -> auto")
