"""`kvorum status --overlap`: what operators read of plans and of hidden AllReduce."""

from __future__ import annotations

import io
import json

from fakes_shard import FORCED, a_report
from rich.console import Console

from cluster.overlap import Answers, to_message
from cluster.overlap_view import overlap_json, overlap_view
from protos import admin_pb2
from workers.overlap.plan import Plan
from workers.overlap.report import PathTotals


def a_status(
    answers: Answers, state: admin_pb2.ReplicaState.ValueType = admin_pb2.READY
) -> admin_pb2.OverlapStatus:
    replica = to_message("replica-0", "e1", state, answers)
    return admin_pb2.OverlapStatus(name="kvorum", tensor_parallel_size=2, replicas=[replica])


def rendered(status: admin_pb2.OverlapStatus, *, colour: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=colour, width=160, highlight=False)
    console.print(overlap_view(status))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rows_of(status: admin_pb2.OverlapStatus) -> list[list[str]]:
    return [line.split() for line in rendered(status).splitlines()]


def test_overlapped_replica_shows_its_path_reason_plan_and_shards() -> None:
    status = a_status({0: a_report(), 1: a_report(1)})
    assert (
        "replica-0: overlapped path: measured at warm-up; LlamaForCausalLM, gloo, --overlap auto"
        in rendered(status)
    )
    rows = rows_of(status)
    assert ["1024", "4", "12.00", "9.80", "31.60", "20.70", "34.5%"] in rows
    assert ["128", "1", "1.50", "0.80", "3.20", "3.20", "0.0%"] in rows
    assert ["0", "stock", "40", "90", "1.500", "40", "0.500", "0.500", "0.0%"] in rows
    assert ["1", "overlapped", "3", "3072", "1.900", "3", "1.200", "0.300", "75.0%"] in rows
    assert "RANKS DISAGREE" not in rendered(status)


def test_forced_plan_shows_no_invented_times() -> None:
    assert ["96", "4", "-", "-", "-", "-", "-"] in rows_of(a_status({0: a_report(plan=FORCED, mode="4")}))


def test_stock_replica_says_why_and_has_no_plan_and_no_row_of_a_path_it_never_took() -> None:
    report = a_report(path="stock", plan=Plan(), reason="one host [shm]", overlapped=PathTotals())
    text = rendered(a_status({0: report}))
    assert "replica-0: stock path: one host [shm]" in text
    assert "from tokens" not in text
    assert not any(row[:2] == ["0", "overlapped"] for row in rows_of(a_status({0: report})))


def test_device_that_tells_no_all_reduce_time_shows_none() -> None:
    untold = PathTotals(steps=5, tokens=50, forward_s=0.25)
    rows = rows_of(a_status({0: a_report(stock=untold, overlapped=PathTotals())}))
    assert ["0", "stock", "5", "50", "0.250", "0", "-", "-", "-"] in rows
    assert ["0", "overlapped", "0", "0", "-", "0", "-", "-", "-"] in rows


def test_silent_shard_is_shown_as_such_beside_the_one_that_answers() -> None:
    text = rendered(a_status({0: "no answer within 2 s", 1: a_report(1)}))
    assert "rank 0 does not say: no answer within 2 s" in text
    assert "replica-0: overlapped path" in text


def test_replica_whose_shards_are_all_silent_says_so() -> None:
    text = rendered(a_status({0: "it has died", 1: "it has died"}))
    assert "replica-0: no shard answers" in text
    assert "rank 1 does not say: it has died" in text


def test_ranks_that_disagree_are_red() -> None:
    status = a_status({0: a_report(), 1: a_report(1, path="stock")})
    assert "RANKS DISAGREE" in rendered(status)
    [line] = [line for line in rendered(status, colour=True).splitlines() if "RANKS DISAGREE" in line]
    assert "\x1b[1;31m" in line


def test_replica_that_is_not_ready_shows_its_state() -> None:
    assert "replica-0: loading; its shards are asked once it is ready" in rendered(
        a_status({}, admin_pb2.LOADING)
    )


def test_json_has_every_field_and_counts_are_numbers() -> None:
    plain = json.loads(overlap_json(a_status({0: a_report(), 1: "it has died"})))
    [replica] = plain["replicas"]
    assert replica["state"] == "READY"
    assert replica["disagreement"] == ""
    assert replica["shards"][0]["overlapped"]["tokens"] == 3072
    assert replica["shards"][0]["plan"]["rows"][1]["chunks"] == 2
    assert replica["shards"][1]["silence"] == "it has died"
