"""Bounds on what constrains generated text (pure).

The engine's grammar compiler is native code that is trusted with what clients write: nested groups in a
schema's pattern have been seen to overflow its stack and end the process, and large schemas to occupy
it for tens of seconds. Everything it accepts within these bounds compiles in about a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protos import common_pb2
from protos.errors import invalid
from router.json_text import parse_object

MAX_SCHEMA_CHARS = 32 * 1024
MAX_SCHEMA_PROPERTIES = 256
MAX_PATTERN_CHARS = 2048
MAX_PATTERN_GROUPS = 64
MAX_GRAMMAR_CHARS = 16 * 1024
MAX_CHOICES = 256
MAX_CHOICE_CHARS = 16 * 1024


def check(output: common_pb2.StructuredOutput) -> None:
    """The constraint is there, not empty, and small enough to be compiled beside other requests.

    Raises:
        KvorumError: INVALID_ARGUMENT naming the field and the bound.
    """
    _pattern("sampling.structured.whitespace_pattern", output.whitespace_pattern)
    kind = output.WhichOneof("constraint")
    field = f"sampling.structured.{kind}"
    if kind is None:
        kinds = "json_schema, regex, choice, grammar, json_object, structural_tag"
        raise invalid("sampling.structured", f"set one of {kinds}")
    if kind == "json_schema":
        _at_most(field, len(output.json_schema), MAX_SCHEMA_CHARS, "characters")
        _schema(field, parse_object(field, output.json_schema))
    elif kind == "choice":
        _choice(field, output.choice.option)
    elif kind == "json_object":
        if not output.json_object:
            raise invalid(field, "must be true when set; leave structured out for free text")
    elif kind == "regex":
        _pattern(field, output.regex)
    elif kind == "structural_tag":
        _at_most(field, len(output.structural_tag), MAX_SCHEMA_CHARS, "characters")
        _structural_tag(field, parse_object(field, output.structural_tag))
    else:
        if not output.grammar.strip():
            raise invalid(field, "must not be empty")
        _at_most(field, len(output.grammar), MAX_GRAMMAR_CHARS, "characters")


def _choice(field: str, options: Any) -> None:
    if not options:
        raise invalid(field, "must have at least one option")
    for index, option in enumerate(options):
        if not option:
            raise invalid(f"{field}[{index}]", "must not be empty")
    _at_most(field, len(options), MAX_CHOICES, "options")
    _at_most(field, sum(len(option) for option in options), MAX_CHOICE_CHARS, "characters in all")


def _schema(field: str, schema: dict[str, Any]) -> None:
    properties = 0
    for node in _objects(schema):
        named = node.get("properties")
        properties += len(named) if isinstance(named, dict) else 0
        _at_most(field, properties, MAX_SCHEMA_PROPERTIES, "properties")
        if isinstance(pattern := node.get("pattern"), str):
            _pattern(field, pattern, "pattern: ")
        if isinstance(keyed := node.get("patternProperties"), dict):
            for pattern in keyed:
                _pattern(field, pattern, "patternProperties: ")


def _structural_tag(field: str, tag: dict[str, Any]) -> None:
    """Formats, JSON schemas, patterns and grammars nest in it in any order: each is held to its own bound."""
    _schema(field, tag)
    for node in _objects(tag):
        if isinstance(grammar := node.get("grammar"), str):
            _at_most(field, len(grammar), MAX_GRAMMAR_CHARS, "characters", "grammar: ")


def _objects(node: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object of the document; its depth is bounded where it was parsed."""
    if isinstance(node, dict):
        yield node
        for child in node.values():
            yield from _objects(child)
    elif isinstance(node, list):
        for child in node:
            yield from _objects(child)


def _pattern(field: str, pattern: str, where: str = "") -> None:
    if "\x00" in pattern:
        raise invalid(field, f"{where}must not contain a NUL character")
    _at_most(field, len(pattern), MAX_PATTERN_CHARS, "characters", where)
    _at_most(field, pattern.count("("), MAX_PATTERN_GROUPS, "groups", where)


def _at_most(field: str, count: int, bound: int, what: str, where: str = "") -> None:
    if count > bound:
        raise invalid(field, f"{where}has {count} {what}, the most is {bound}")
