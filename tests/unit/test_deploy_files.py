"""deploy/: every file parses, and asks for metrics that the code has."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml

from telemetry.viewer.prometheus import family_name

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RULES = DEPLOY / "prometheus-rules.yml"

_INSTRUMENT = re.compile(r"(kvorum|gen_ai|system|process|hw)(\.[a-z_]+)+")
_METRIC = re.compile(r"\b(?:kvorum|gen_ai|system|process|hw)_[a-z0-9_]+|\bvllm:[a-z_]+")
_RECORDED = re.compile(r"\bkvorum:[a-z_:0-9]+")
_UNITS = ("", "s", "By", "Cel", "W", "1")
_GROUPED = re.compile(r"\b(?:by|on|without|ignoring|group_left)\s*\([^)]*\)")
_MATCHERS = re.compile(r"\{[^}]*\}")


@cache
def registered() -> frozenset[str]:
    """Names under which Prometheus may know what the code measures."""
    found: set[str] = set()
    for package in ("cluster", "router", "telemetry", "workers"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                values = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
                found |= set(_names([getattr(value, "value", None) for value in values]))
    return frozenset(found)


def _names(values: list[Any]) -> Iterator[str]:
    """Of each instrument among the values of a call or a tuple; its unit, if told, stands behind it."""
    for value, unit in zip_longest(values, values[1:]):
        if not isinstance(value, str) or not _INSTRUMENT.fullmatch(value):
            continue
        told = isinstance(unit, str) and (unit in _UNITS or unit.startswith("{"))
        for one in (unit,) if told else _UNITS:
            name = family_name(value, one, counter=False)
            yield family_name(value, one, counter=True)
            yield from (name, f"{name}_bucket", f"{name}_sum", f"{name}_count")


@cache
def engine_metrics() -> frozenset[str]:
    """What vLLM registers; empty where it is not installed. Its source is read: to run it takes seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    source = Path(spec.origin).parent / "v1" / "metrics" / "loggers.py"
    names = set(re.findall(r'"(vllm:[a-z_]+)"', source.read_text()))
    return frozenset(
        f"{name}{suffix}" for name in names for suffix in ("", "_total", "_bucket", "_sum", "_count")
    )


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a dashboard, without its rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions(dashboard: dict[str, Any]) -> list[str]:
    """All PromQL of a dashboard, its variables included."""
    asked = [target["expr"] for panel in panels(dashboard) for target in panel["targets"] if "expr" in target]
    variables = [
        variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable
    ]
    return asked + [re.sub(r"label_values\((.+), \w+\)", r"\1", variable) for variable in variables]


def rules() -> list[dict[str, str]]:
    """All rules of all groups."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def metrics(expression: str) -> set[str]:
    """Metrics that an expression reads."""
    return set(_METRIC.findall(_MATCHERS.sub("", _GROUPED.sub("", expression))))


def recorded(expression: str) -> set[str]:
    """Series of recording rules that an expression reads."""
    return set(_RECORDED.findall(_MATCHERS.sub("", expression)))


def loaded(path: Path) -> dict[str, Any]:
    """A JSON file."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def all_expressions() -> list[tuple[str, str]]:
    """(where, PromQL) of everything in deploy/."""
    found = [(RULES.name, rule["expr"]) for rule in rules()]
    return found + [
        (path.name, expression) for path in DASHBOARDS for expression in expressions(loaded(path))
    ]


def test_every_metric_asked_for_is_one_that_the_code_registers() -> None:
    known = registered() | engine_metrics()
    asked = {(where, name) for where, expression in all_expressions() for name in metrics(expression)}
    unknown = {pair for pair in asked if pair[1] not in known}
    if not engine_metrics():
        unknown = {pair for pair in unknown if not pair[1].startswith("vllm:")}
    assert unknown == set()
    assert len({name for _, name in asked}) > 40  # the patterns above do find them


def test_every_recorded_series_asked_for_is_recorded() -> None:
    made = {rule["record"] for rule in rules() if "record" in rule}
    asked = {name for _, expression in all_expressions() for name in recorded(expression)}
    assert asked == made


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"critical", "warning", "info"}, rule
            assert set(rule["annotations"]) == {"summary", "action"}, rule


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda path: path.name)
def test_yaml_parses(path: Path) -> None:
    assert yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_is_whole(path: Path) -> None:
    dashboard = loaded(path)
    assert dashboard["uid"] == path.stem
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    for panel in panels(dashboard):
        assert panel["targets"], panel["title"]
        used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(panel)))
        assert used <= variables, panel["title"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_fill_the_grid_without_overlap(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in loaded(path)["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_dashboards_name_data_sources_that_are_provisioned() -> None:
    given = yaml.safe_load((DEPLOY / "grafana" / "datasources" / "kvorum.yaml").read_text())["datasources"]
    by_uid = {source["uid"]: source["type"] for source in given}
    for path in DASHBOARDS:
        for variable in loaded(path)["templating"]["list"]:
            if variable["type"] == "datasource":
                assert by_uid[variable["current"]["value"]] == variable["query"], path.name


def test_collector_pipelines_use_what_is_defined_and_leave_nothing_out() -> None:
    config = yaml.safe_load((DEPLOY / "otel-collector.yaml").read_text())
    service = config["service"]
    for kind in ("receivers", "processors", "exporters"):
        used = {name for pipeline in service["pipelines"].values() for name in pipeline[kind]}
        assert used == set(config[kind])
    assert set(service["extensions"]) == set(config["extensions"])
    for pipeline in service["pipelines"].values():
        assert pipeline["processors"][0] == "memory_limiter"  # before anything that holds data


def test_compose_mounts_files_that_exist_and_opens_ports_to_this_machine_only() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        assert ":" in service["image"], name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), volume
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), port
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool: `make setup-browser`, or Debian's package prometheus")
    return found


def run(*command: str | Path) -> None:
    """Run a checker; fail with what it says."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_configuration_and_rules(promtool: str) -> None:
    run(promtool, "check", "config", DEPLOY / "prometheus.yml")
    run(promtool, "check", "rules", RULES)


def test_alerts_fire_when_they_should_and_only_then(promtool: str) -> None:
    run(promtool, "test", "rules", Path(__file__).parent / "prometheus_rules_test.yml")


def test_promtool_accepts_every_expression_of_the_dashboards(promtool: str, tmp_path: Path) -> None:
    made = [
        {
            "record": f"checked:{number}",
            "expr": re.sub(r"\$__rate_interval", "1m", expression).replace("$", "x"),
        }
        for number, expression in enumerate(e for path in DASHBOARDS for e in expressions(loaded(path)))
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": made}]}))
    run(promtool, "check", "rules", file)
