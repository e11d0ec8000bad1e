"""The whole configuration of a cluster: one YAML file, every field also a flag (`cluster.flags`)."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from rapidfuzz import fuzz, process

from cluster.failures import ConfigError
from cluster.http_config import HttpConfig
from cluster.viewer_config import ViewerConfig
from router.config import RouterConfig
from telemetry.config import TelemetryConfig
from workers.config import EngineConfig

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]


class ClusterConfig(BaseModel):
    """A model, how often it is replicated, and where the parts listen. Times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name = Field("kvorum", description="what `status`, `down` and the others call this cluster")
    replicas: int | None = Field(
        None, ge=1, description="engines that serve the model; fits the machine by default"
    )
    placement: Literal["pack", "spread"] = Field(
        "pack", description="the shards of one replica on one host, or over several"
    )
    ray_address: str | None = Field(
        None, description="Ray cluster to join: HOST:PORT or auto; without it a private one is started"
    )
    object_store_mib: int = Field(
        200, ge=80, description="shared memory of a private Ray, MiB; tokens never pass it"
    )
    ray_timeout_s: float = Field(90.0, gt=0, description="a Ray that cannot be reached by then has failed")
    admin_host: str = Field("127.0.0.1", description="address of the controller's admin API")
    admin_port: int = Field(0, ge=0, le=65535, description="port of the admin API; 0 picks a free one")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="what every replica runs")
    router: RouterConfig = Field(default_factory=RouterConfig, description="the public gRPC face")
    http: HttpConfig = Field(default_factory=HttpConfig, description="the OpenAI-compatible face")
    viewer: ViewerConfig = Field(default_factory=ViewerConfig, description="the page over the whole cluster")
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig, description="traces")


def load(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> ClusterConfig:
    """Read a YAML file (none: the defaults), lay `overrides` (nested like the file) over it, validate.

    Mappings are merged key by key, so that one flag changes one entry of `engine_args`. Relative paths
    of the file are taken from its own folder, those of overrides from the working directory.

    Raises:
        ConfigError: unreadable, not YAML, an unknown key (with the nearest known one), a wrong type or
            range; one problem a line, with the file's line where it comes from the file.
    """
    data: dict[str, Any] = {}
    lines: dict[tuple[str, ...], int] = {}
    if path is not None:
        data, lines = _read(path)
        data = _rooted(ClusterConfig, data, path.resolve().parent)
    data = _merged(data, _rooted(ClusterConfig, overrides or {}, Path.cwd()))
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        problems = [_explain(path, lines, overrides or {}, detail) for detail in error.errors()]
        raise ConfigError(*dict.fromkeys(problems)) from None


def dump(config: ClusterConfig) -> str:
    """The effective configuration as YAML that `load` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


def leaves(
    model: type[BaseModel] = ClusterConfig, at: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every field that holds a value, with its path from the top: `("router", "port")`.

    Without the internal ones, which the launcher sets.
    """
    for name, field in model.model_fields.items():
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("internal"):
            continue
        if (nested := section(field)) is not None:
            yield from leaves(nested, (*at, name))
        else:
            yield (*at, name), field


def section(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a nested section; None for a field that holds a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def bare_type(annotation: Any) -> Any:
    """The type under `X | None` and `Annotated[X, ...]`."""
    if get_origin(annotation) is Annotated:
        return bare_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        options = [option for option in get_args(annotation) if option is not type(None)]
        return bare_type(options[0]) if len(options) == 1 else annotation
    return annotation


def _read(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from None
    if data is None:
        return {}, {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(data).__name__}")
    lines: dict[tuple[str, ...], int] = {}
    _note_lines(path, root, (), lines)
    return data, lines


def _note_lines(
    path: Path, node: yaml.Node | None, at: tuple[str, ...], lines: dict[tuple[str, ...], int]
) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        here = (*at, str(key.value))
        if here in lines:
            raise ConfigError(
                f"{path}:{key.start_mark.line + 1}: {'.'.join(here)} is set already on line {lines[here]}"
            )
        lines[here] = key.start_mark.line + 1
        _note_lines(path, value, here, lines)


def _rooted(model: type[BaseModel], data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`data` with its relative paths made absolute: other processes have other working directories."""
    rooted = dict(data)
    for name, field in model.model_fields.items():
        value = rooted.get(name)
        if (nested := section(field)) is not None and isinstance(value, Mapping):
            rooted[name] = _rooted(nested, value, folder)
        elif (bare_type(field.annotation) is Path or name == "kv_pool_folder") and isinstance(
            value, str | Path
        ):
            rooted[name] = str(_absolute(value, folder))
        elif name == "lora_modules" and isinstance(value, Mapping):
            rooted[name] = {
                k: str(_absolute(v, folder)) if isinstance(v, str) else v for k, v in value.items()
            }
        elif name == "model" and isinstance(value, str) and value.startswith((".", "~", "/")):
            rooted[name] = str(_absolute(value, folder))
    return rooted


def _absolute(value: str | Path, folder: Path) -> Path:
    return (folder / Path(value).expanduser()).resolve()


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = (
            _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def _explain(
    path: Path | None, lines: dict[tuple[str, ...], int], overrides: Mapping[str, Any], detail: Any
) -> str:
    location = tuple(str(part) for part in detail["loc"])
    where = ""
    if path is not None and not _holds(overrides, location):
        line = next((lines[location[:n]] for n in range(len(location), 0, -1) if location[:n] in lines), None)
        where = f"{path}:{line}: " if line else f"{path}: "
    name = ".".join(location) or "the configuration"
    if detail["type"] == "extra_forbidden":
        return f"{where}{name}: unknown key{_nearest(location)}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    if location == ("name",) and detail["type"] == "string_pattern_mismatch":
        message = "use lower-case letters, digits and inner dashes, 32 at most"
    given = detail.get("input")
    shown = "" if isinstance(given, Mapping) or detail["type"] == "missing" else f" (got {given!r})"
    return f"{where}{name}: {message[:1].lower()}{message[1:]}{shown}"


def _holds(data: Mapping[str, Any], location: tuple[str, ...]) -> bool:
    here: Any = data
    for part in location:
        if not isinstance(here, Mapping) or part not in here:
            return False
        here = here[part]
    return bool(location)


def _nearest(location: tuple[str, ...]) -> str:
    """Look among the siblings first: a typing slip is likelier than a wrong section."""
    model: type[BaseModel] = ClusterConfig
    for part in location[:-1]:
        nested = section(model.model_fields[part]) if part in model.model_fields else None
        if nested is None:
            return ""
        model = nested
    found = process.extractOne(location[-1], list(model.model_fields), scorer=fuzz.ratio, score_cutoff=75)
    if found:
        return f"; did you mean {found[0]}?"
    everywhere = {".".join(at): at[-1] for at, _field in leaves()}
    elsewhere = process.extractOne(location[-1], everywhere, scorer=fuzz.ratio, score_cutoff=80)
    if elsewhere:
        return f"; did you mean {elsewhere[2]}?"
    return f"; known here: {', '.join(model.model_fields)}"
