"""State files: private, atomic, and found by the commands that need them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cluster import state as states
from cluster.failures import BadInput, RunFailed
from cluster.processes import ProcessMark
from cluster.state import ClusterState


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(states.STATE_DIR_VARIABLE, str(tmp_path / "state"))
    return tmp_path / "state"


def a_state(name: str = "kvorum", **changes: object) -> ClusterState:
    fields = {
        "name": name, "id": "c0ffee", "launcher": ProcessMark.of(os.getpid()),
        "token": "secret-token", "work_dir": Path("/nowhere"),
    }  # fmt: skip
    return ClusterState.model_validate(fields | changes)


def test_what_is_written_is_read_back() -> None:
    state = a_state(router_addresses=("127.0.0.1:1",), ray_head=ProcessMark.of(os.getpid()), phase="running")
    states.write(state)
    assert states.read("kvorum") == state


def test_only_the_owner_can_read_the_token(folder: Path) -> None:
    states.write(a_state())
    assert stat.S_IMODE((folder / "kvorum.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_token_stays_out_of_logs() -> None:
    assert "secret-token" not in repr(a_state())


def test_rewriting_leaves_no_temporary_file(folder: Path) -> None:
    states.write(a_state())
    states.write(a_state(phase="running"))
    assert [path.name for path in folder.iterdir()] == ["kvorum.json"]


def test_no_state_reads_as_none_and_removing_it_is_fine() -> None:
    assert states.read("kvorum") is None
    states.remove("kvorum")


def test_damaged_state_is_refused_by_name(folder: Path) -> None:
    folder.mkdir()
    (folder / "kvorum.json").write_text("{")
    with pytest.raises(RunFailed, match=r"kvorum\.json is unreadable"):
        states.read("kvorum")


def test_the_only_cluster_needs_no_name() -> None:
    states.write(a_state("demo"))
    assert states.find(None).name == "demo"


def test_the_default_name_is_preferred_among_several() -> None:
    states.write(a_state("demo"))
    states.write(a_state("kvorum"))
    assert states.find(None).name == "kvorum"


def test_several_clusters_need_a_name() -> None:
    states.write(a_state("one"))
    states.write(a_state("two"))
    with pytest.raises(BadInput, match=r"several clusters are up \(one, two\)"):
        states.find(None)


def test_unknown_name_lists_what_runs() -> None:
    states.write(a_state("demo"))
    with pytest.raises(BadInput, match=r"no cluster named 'prod' .* running: demo"):
        states.find("prod")


def test_two_commands_cannot_start_one_cluster_at_once() -> None:
    with states.locked("kvorum"):
        with pytest.raises(BadInput, match="another kvorum command"), states.locked("kvorum"):
            pass
        with states.locked("other"):
            pass
    with states.locked("kvorum"):
        pass


def test_unwritable_state_folder_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(states.STATE_DIR_VARIABLE, str(tmp_path / "file" / "below"))
    with pytest.raises(RunFailed, match="cannot make the state folder"):
        states.state_dir()
