"""Every field of the configuration as a command-line flag, generated from the pydantic models.

    @click.command(cls=GroupedCommand)
    @config_flags()
    def up(**given): config = load(path, overrides(given))

A field's flag is its own name where that is unique (`--tensor-parallel-size`), else its section comes
first (`--router-host`). Mappings repeat: `--engine-arg KEY=VALUE`, the value read as YAML.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.config import ClusterConfig, bare_type, leaves, section

F = TypeVar("F", bound=Callable[..., Any])

_PREFIXED = {
    "host",
    "port",
    "enabled",
    "store",
    "via",
    "lookaside",
    "max_replicas",
    "max_ongoing_requests",
    "request_timeout_s",
    "arguments",
}
"""Names that say nothing without their section, even where they happen to be unique."""

_SHORT: dict[tuple[str, ...], str] = {
    ("router", "port"): "port",
    ("router", "tls_cert"): "tls_cert",
    ("router", "tls_key"): "tls_key",
    ("http", "enabled"): "http",
    ("viewer", "enabled"): "viewer",
}
"""What everybody asks for."""

_SEPARATOR = "__"


@dataclass(frozen=True)
class Flag:
    """One field seen from the command line; `path` is where its value goes in the configuration."""

    path: tuple[str, ...]
    option: str
    field: FieldInfo

    @property
    def parameter(self) -> str:
        """The keyword a click command receives the value under."""
        return _SEPARATOR.join(("config", *self.path))

    @property
    def kind(self) -> Any:
        return bare_type(self.field.annotation)

    @property
    def is_mapping(self) -> bool:
        return get_origin(self.kind) is dict

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) in (list, tuple)


def all_flags(model: type[BaseModel] = ClusterConfig) -> list[Flag]:
    """One flag a field, in the order of the configuration.

    Raises:
        ValueError: two fields would get the same flag.
    """
    fields = list(leaves(model))
    names = [path[-1] for path, _ in fields]
    flags = []
    for path, field in fields:
        unique = names.count(path[-1]) == 1 and path[-1] not in _PREFIXED
        option = _SHORT.get(path) or (path[-1] if unique else "_".join(path))
        kind = bare_type(field.annotation)
        if get_origin(kind) in (dict, list, tuple):
            option = option.removesuffix("s")
        flags.append(Flag(path, option.replace("_", "-"), field))
    options = [flag.option for flag in flags]
    if doubled := {option for option in options if options.count(option) > 1}:
        raise ValueError(f"fields share the flags {sorted(doubled)}: add their names to _PREFIXED")
    return flags


def config_flags(*sections: str) -> Callable[[F], F]:
    """Give a click command the flags of these sections, of all by default; the values are for `overrides`."""

    def decorate(command: F) -> F:
        for flag in reversed(all_flags()):
            if not sections or flag.path[0] in sections:
                command = _option(flag)(command)
        return command

    return decorate


def overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """The flags somebody did give, nested as `cluster.config.load` takes them."""
    nested: dict[str, Any] = {}
    for flag in all_flags():
        value = given.get(flag.parameter)
        if value is None or (value == () and (flag.is_mapping or flag.is_list)):
            continue
        here = nested
        for part in flag.path[:-1]:
            here = here.setdefault(part, {})
        if flag.is_mapping:
            here[flag.path[-1]] = dict(value)
        elif flag.is_list:
            here[flag.path[-1]] = list(value)
        else:
            here[flag.path[-1]] = value
    return nested


class GroupedCommand(click.Command):
    """A command whose help lists the configuration's flags by section, after its own options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        by_parameter = {flag.parameter: flag for flag in all_flags()}
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            flag = by_parameter.get(parameter.name or "")
            groups.setdefault(_title(flag) if flag else "Options", []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records, col_max=34)


class KeyValue(click.ParamType[tuple[str, Any]]):
    """`KEY=VALUE`; with `as_yaml` the value `4` is a number and `{a: 1}` a mapping."""

    name = "key=value"

    def __init__(self, as_yaml: bool) -> None:
        self._as_yaml = as_yaml

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        key, equals, text = str(value).partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        if not self._as_yaml:
            return key, text
        try:
            return key.replace("-", "_"), yaml.safe_load(text)
        except yaml.YAMLError:
            self.fail(f"the value of {key!r} is not YAML: {text!r}; quote it", param, ctx)


def _option(flag: Flag) -> Callable[[F], F]:
    shared: dict[str, Any] = {"default": None, "help": _help(flag)}
    name = f"--{flag.option}"
    if flag.kind is bool:
        return click.option(f"{name}/--no-{flag.option}", flag.parameter, **shared)
    if flag.is_mapping:
        free = get_args(flag.kind)[1] is Any
        shared |= {"multiple": True, "type": KeyValue(free), "metavar": "KEY=VALUE" if free else "NAME=PATH"}
    elif flag.is_list:
        shared |= {"multiple": True, "type": _click_type(bare_type(get_args(flag.kind)[0]))}
    else:
        shared["type"] = _click_type(flag.kind)
    return click.option(name, flag.parameter, **shared)


def _click_type(kind: Any) -> click.ParamType[Any]:
    """Only the shape is click's business: ranges are checked once, by pydantic."""
    if get_origin(kind) is Literal:
        return click.Choice([str(choice) for choice in get_args(kind)])
    if kind is Path:
        return click.Path(path_type=Path)
    simple: dict[Any, click.ParamType[Any]] = {int: click.INT, float: click.FLOAT}
    return simple.get(kind, click.STRING)


def _help(flag: Flag) -> str:
    text = (flag.field.description or "").replace("%%", "%")
    default = flag.field.default
    shown = isinstance(default, str | int | float) and not isinstance(default, bool)
    if flag.kind is bool and default is True:
        return f"{text} [default: on]"
    return f"{text} [default: {default}]" if shown else text


def _title(flag: Flag) -> str:
    if len(flag.path) == 1:
        return "Cluster"
    field = ClusterConfig.model_fields[flag.path[0]]
    assert section(field) is not None
    return f"{flag.path[0].capitalize()}: {field.description}"
