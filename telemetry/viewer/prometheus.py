"""Prometheus text (format 0.0.4): names and labels as OpenTelemetry prescribes them, from many sources.

https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_MAX_VALUE_CHARS: Final = 512
_MAX_HELP_CHARS: Final = 512
_MAX_NAME_CHARS: Final = 256
_NOT_IN_NAME: Final = re.compile(r"[^a-zA-Z0-9:]+")
_NOT_IN_LABEL: Final = re.compile(r"[^a-zA-Z0-9]+")
_ANNOTATION: Final = re.compile(r"{.*}")
_UNITS: Final = {
    "d": "days", "h": "hours", "min": "minutes", "s": "seconds", "ms": "milliseconds", "us": "microseconds",
    "ns": "nanoseconds", "By": "bytes", "KiBy": "kibibytes", "MiBy": "mebibytes", "GiBy": "gibibytes",
    "TiBy": "tibibytes", "KBy": "kilobytes", "MBy": "megabytes", "GBy": "gigabytes", "TBy": "terabytes",
    "m": "meters", "V": "volts", "A": "amperes", "J": "joules", "W": "watts", "g": "grams", "Cel": "celsius",
    "Hz": "hertz", "1": "", "%": "percent",
}  # fmt: skip
_PER: Final = {"s": "second", "m": "minute", "h": "hour", "d": "day", "w": "week", "mo": "month", "y": "year"}
_KINDS: Final = frozenset({"counter", "gauge", "histogram", "summary", "untyped"})

_SUFFIXES: Final = frozenset({"", "_bucket", "_sum", "_count", "_created"})

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_META: Final = re.compile(rf"# (HELP|TYPE) ({_NAME})(?: (.*))?")
_SAMPLE: Final = re.compile(
    rf"({_NAME})(?:\{{((?:[a-zA-Z_][a-zA-Z0-9_]*=\"(?:[^\"\\]|\\.)*\",?)*)\}})?"
    r"[ \t]+([+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|Inf)|NaN)(?:[ \t]+-?\d+)?[ \t]*"
)
"""A sample: name, labels, value; a timestamp is dropped, Prometheus gives all of a scrape one time."""


def family_name(name: str, unit: str, *, counter: bool) -> str:
    """The name under which an OpenTelemetry instrument is exposed; empty when nothing of it can stand there.

    As opentelemetry-exporter-prometheus has it: kvorum.router.ttft in s becomes kvorum_router_ttft_seconds,
    a counter ends with _total.
    """
    base = _NOT_IN_NAME.sub("_", ("_" + name[1:] if name[:1].isdigit() else name)[:_MAX_NAME_CHARS])
    suffix = _unit(unit)
    if not base.strip("_"):
        return ""
    base = base.removesuffix("_total") if counter else base
    if suffix and not base.endswith("_" + suffix):
        base = f"{base}_{suffix}"
    return base + "_total" if counter else base


def label_text(fixed: Iterable[tuple[str, str]], attributes: Mapping[str, object]) -> str:
    """The labels between the braces: `fixed` ones, and attributes under names that Prometheus allows.

    Attributes whose names become equal share a label, values joined by ";". One that would hide a fixed
    label, or is reserved for buckets and quantiles, gets "exported_" before its name.
    """
    labels = dict(fixed)
    reserved = {*labels, "le", "quantile"}
    for key, value in sorted(attributes.items()):
        name = _NOT_IN_LABEL.sub("_", ("_" + key[1:] if key[:1].isdigit() else key)[:_MAX_NAME_CHARS])
        if not name.strip("_"):
            continue
        name = f"exported_{name}" if name in reserved else name
        text = str(value).lower() if isinstance(value, bool) else str(value)
        labels[name] = f"{labels[name]};{text}" if name in labels else text
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def number_text(value: float) -> str:
    """A sample's value."""
    if value != value:  # noqa: PLR0124  (NaN)
        return "NaN"
    if value in {float("inf"), float("-inf")}:
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


@dataclass(slots=True)
class _Family:
    kind: str
    about: str
    lines: list[str] = field(default_factory=list)


class Exposition:
    """One text for all sources: each family stands once, with the kind and the help that came first."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self.refused = 0
        """Lines left out: malformed, or of another kind than their family."""

    def add(self, name: str, kind: str, about: str, lines: Iterable[str]) -> None:
        """Add samples, whole lines without an end, to a family."""
        family = self._families.setdefault(name, _Family(kind, about))
        listed = list(lines)
        if family.kind == kind:
            family.lines += listed
        else:
            self.refused += len(listed)

    def merge(self, text: str, label: str, value: str) -> None:
        """Add another process's exposition, with a label that says whose it is."""
        mark = f'{label}="{_escaped(value)}"'
        other: dict[str, _Family] = {}
        current = ""
        about: dict[str, str] = {}
        for line in text.split("\n"):
            if meta := _META.fullmatch(line):
                what, name, rest = meta.groups()
                if what == "HELP":
                    about[name] = (rest or "")[:_MAX_HELP_CHARS]
                elif rest in _KINDS:
                    current = name
                    other.setdefault(name, _Family(rest, about.get(name, "")))
            elif sample := _SAMPLE.fullmatch(line):
                name, labels, number = sample.groups()
                if not (name.startswith(current) and name[len(current) :] in _SUFFIXES):
                    current = name
                family = other.setdefault(current, _Family("untyped", about.get(current, "")))
                rest = _renamed(labels.rstrip(","), label) if labels else ""
                if len(number) > 16 or "e" in number.lower():  # may be more than a double holds
                    number = number_text(float(number))
                family.lines.append(f"{name}{{{mark}{',' + rest if rest else ''}}} {number}")
            elif line.strip() and not line.startswith("#"):
                self.refused += 1
        for name, family in other.items():
            # A help that came as text is escaped already.
            self.add(name, family.kind, _unescaped(family.about), family.lines)

    def text(self) -> str:
        """All of it, families by name."""
        parts: list[str] = []
        for name, family in sorted(self._families.items()):
            if family.lines:
                about = family.about[:_MAX_HELP_CHARS].replace("\\", r"\\").replace("\n", r"\n")
                parts += [f"# HELP {name} {about}".rstrip(), f"# TYPE {name} {family.kind}", *family.lines]
        return "\n".join(parts) + "\n" if parts else ""


def _unit(unit: str) -> str:
    unit = _ANNOTATION.sub("", unit)[:64]
    if unit in _UNITS:
        return _UNITS[unit]
    top, slash, bottom = unit.partition("/")
    bottom = _NOT_IN_NAME.sub("_", bottom)
    if slash and bottom:
        top = _NOT_IN_NAME.sub("_", top)
        return f"{_UNITS.get(top, top)}_per_{_PER.get(bottom, bottom)}".lstrip("_")
    return _NOT_IN_NAME.sub("_", unit).strip("_")


def _escaped(value: str) -> str:
    return value[:_MAX_VALUE_CHARS].replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)


def _renamed(labels: str, label: str) -> str:
    """Labels in which `label` is free: a source's own one of that name is kept as exported_…"""
    if label not in labels:
        return labels
    return re.sub(rf'(^|,){label}="', rf'\1exported_{label}="', labels)
