"""What operators read: the table, the JSON, and progress on a terminal and in a pipe."""

from __future__ import annotations

import io
import json

from fakes_shard import FORCED, a_report
from rich.console import Console

from cluster.display import (
    ReplicaProgress,
    Steps,
    duration,
    hit_rate,
    shards_text,
    status_json,
    status_view,
)
from cluster.overlap import summary
from protos import admin_pb2, common_pb2


def a_console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=200, highlight=False)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def a_replica(
    state: admin_pb2.ReplicaState.ValueType = admin_pb2.READY, **fields: object
) -> admin_pb2.ReplicaStatus:
    replica = admin_pb2.ReplicaStatus(replica="replica-0", epoch="e1e1e1e1", state=state, state_for_s=75)
    replica.shards.add(rank=0, node="10.0.0.1", pid=11, cores=[0, 1, 2, 5], collective="shm", alive=True)
    for name, value in fields.items():
        setattr(replica, name, value)
    return replica


def a_status(*replicas: admin_pb2.ReplicaStatus) -> admin_pb2.ClusterStatus:
    model = common_pb2.ModelInfo(name="smollm2", max_model_len=8192)
    status = admin_pb2.ClusterStatus(name="kvorum", model=model, tensor_parallel_size=2)
    status.replicas.extend(replicas)
    status.routers.add(name="router-0", address="127.0.0.1:50051", pid=7, alive=True)
    return status


def rendered(status: admin_pb2.ClusterStatus) -> str:
    console = a_console()
    console.print(status_view(status))
    return text_of(console)


def test_table_shows_load_cache_and_where_shards_sit() -> None:
    replica = a_replica(restarts=3)
    replica.load.CopyFrom(
        common_pb2.ReplicaLoad(
            running=2, waiting=1, kv_usage=0.256, prefix_queries_tokens=400, prefix_hits_tokens=300
        )
    )
    text = rendered(a_status(replica))
    for expected in ("smollm2", "1/1 replicas ready", "TP 2", "26%", "2/1", "75% (300/400)", "1m15s", " 3\n"):
        assert expected in text
    assert "0: 10.0.0.1 core 0-2,5 pid 11 (shm)" in text
    assert "router-0: 127.0.0.1:50051" in text


def test_replica_without_a_load_report_shows_no_invented_zeros() -> None:
    row = next(line for line in rendered(a_status(a_replica())).splitlines() if line.startswith("replica-0"))
    assert "0%" not in row
    assert "0/0" not in row


def test_last_error_is_shown_as_it_is() -> None:
    text = rendered(a_status(a_replica(admin_pb2.FAILED, last_error="shard [rank 1] died")))
    assert "replica-0 last error: shard [rank 1] died" in text


def test_replicas_of_one_mind_share_a_line_about_overlap() -> None:
    replicas = [
        a_replica(replica=f"replica-{k}", overlap="4 chunks from 512 tokens (measured)") for k in range(2)
    ]
    lines = [line.strip() for line in rendered(a_status(*replicas)).splitlines() if "overlap" in line]
    assert lines == ["overlap: 4 chunks from 512 tokens (measured)"]
    replicas[1].overlap = "stock path: the link is gone [eth0]"
    lines = [line.strip() for line in rendered(a_status(*replicas)).splitlines() if "overlap" in line]
    assert lines == [
        "overlap of replica-0: 4 chunks from 512 tokens (measured)",
        "overlap of replica-1: stock path: the link is gone [eth0]",
    ]


def test_ranks_that_disagree_are_red_in_plain_status() -> None:
    line = summary({0: a_report(0), 1: a_report(1, FORCED)})
    console = a_console(terminal=True)
    console.print(status_view(a_status(a_replica(overlap=line))))
    assert "\x1b[1;31mRANKS DISAGREE: rank 0: " in text_of(console)


def test_nothing_is_said_of_overlap_before_the_shards_have() -> None:
    assert "overlap" not in rendered(a_status(a_replica()))


def test_dead_router_and_dead_shard_are_visible() -> None:
    replica = a_replica()
    replica.shards[0].alive = False
    status = a_status(replica)
    status.routers[0].alive = False
    assert "DEAD" in shards_text(replica)
    assert "router-0: down" in rendered(status)


def test_json_has_every_field_and_counts_are_numbers() -> None:
    replica = a_replica()
    replica.load.prefix_hits_tokens = 2**40
    plain = json.loads(status_json(a_status(replica)))
    assert plain["replicas"][0]["load"]["prefix_hits_tokens"] == 2**40
    assert plain["replicas"][0]["state"] == "READY"
    assert plain["replicas"][0]["restarts"] == 0
    assert plain["replicas"][0]["shards"][0]["cores"] == [0, 1, 2, 5]
    assert plain["controller_pid"] == 0


def test_piped_progress_is_one_line_a_change() -> None:
    console = a_console()
    with ReplicaProgress(console) as progress:
        for state in (admin_pb2.PLACED, admin_pb2.LOADING, admin_pb2.LOADING, admin_pb2.READY):
            progress.show(a_status(a_replica(state)))
    lines = text_of(console).splitlines()
    assert [line.split()[1] for line in lines] == ["placed", "loading", "ready"]


def test_failure_in_progress_says_why() -> None:
    console = a_console()
    with ReplicaProgress(console) as progress:
        progress.show(a_status(a_replica(admin_pb2.FAILED, last_error="out of memory [1]")))
    assert "failed" in text_of(console)
    assert "out of memory [1]" in text_of(console)


def test_terminal_progress_shows_loading_replicas_and_keeps_ready_ones() -> None:
    console = a_console(terminal=True)
    with ReplicaProgress(console) as progress:
        progress.show(a_status(a_replica(admin_pb2.LOADING)))
        progress.show(a_status(a_replica(admin_pb2.READY)))
    assert "loading" in text_of(console)
    assert "ready" in text_of(console)


def test_step_prints_its_outcome_and_a_failed_one_claims_none() -> None:
    console = a_console()
    steps = Steps(console)
    with steps.step("starting Ray") as note:
        note.text = "Ray at 127.0.0.1:1"
    try:
        with steps.step("placing", "placed"):
            raise RuntimeError
    except RuntimeError:
        pass
    assert "✓ Ray at 127.0.0.1:1" in text_of(console)
    assert "placed" not in text_of(console)


def test_piped_preparation_prints_each_stage_once() -> None:
    console = a_console()
    with Steps(console).bar("preparing m") as bar:
        for stage, fraction in (("convert", 0.0), ("convert", 0.5), ("pad", 0.0)):
            bar(stage, fraction)
    assert [line.strip() for line in text_of(console).splitlines()] == [
        "preparing m: convert",
        "preparing m: pad",
    ]


def test_durations_and_rates_read_well() -> None:
    assert [duration(s) for s in (0.9, 59.9, 60, 187, 7500)] == ["0s", "59s", "1m00s", "3m07s", "2h05m"]
    assert (hit_rate(0, 0), hit_rate(1, 4)) == ("-", "25% (1/4)")
