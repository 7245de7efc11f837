"""A configuration from YAML and dotted overrides, and back to YAML; every mistake is a ConfigError."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nereus.config import Config
from nereus.errors import ConfigError
from nereus.interchange.start import from_folder

QUICKSTART = "experiments/quickstart.yaml"
EXPECTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text (in quotes if it looks otherwise)",
}
MISPLACED = (OmegaConfBaseException, IndexError, TypeError, ValueError)  # what OmegaConf raises for an impossible path

Record = TypeVar("Record")


def load_config(path: Path | None, overrides: list[str], stated: Mapping[str, object] | None = None) -> Config:
    """The Config of the YAML file at `path` with overrides such as `run.steps=3` applied in order.

    `stated` gives whole sections and keys (dotted) that take the place of the file's, before the overrides.
    Raises ConfigError, naming the key path, the value and what would be right, for a missing or malformed file, an
    unknown key and a value of the wrong type. Whether the values fit together is `nereus.validate`'s question.
    """
    if path is None:
        raise ConfigError("CONFIG", None, f"expected a configuration file, such as the shipped {QUICKSTART}")
    document = _document(path)
    for key, value in (stated or {}).items():
        OmegaConf.update(document, key, _escaped(value), merge=False)
    for override in overrides:
        document = _overridden(document, override)
    try:
        plain = OmegaConf.to_container(document, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError("CONFIG", str(path), _first_line(error)) from error
    return from_folder(_record(Config, plain, ""), cast("dict[str, Any]", plain))


def dump_config(config: Config) -> str:
    """The YAML text of `config`, with every value stated; `load_config` reads it back equal."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(dataclasses.asdict(config))))


def _document(path: Path) -> Any:
    """The OmegaConf node of a YAML file; a syntax error is told with its line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError("CONFIG", str(path), f"no such file; the shipped quickstart is {QUICKSTART}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("CONFIG", str(path), f"expected a readable YAML file: {error}") from error
    try:
        node = OmegaConf.create(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError("CONFIG", str(path), f"expected YAML; line {line}: {error.problem}") from error
    except (yaml.YAMLError, *MISPLACED) as error:
        raise ConfigError("CONFIG", str(path), f"expected YAML: {_first_line(error)}") from error
    if not OmegaConf.is_dict(node):
        raise ConfigError("CONFIG", str(path), f"expected sections: {', '.join(_keys(Config))}")
    return node


def _overridden(document: Any, override: str) -> Any:
    """`document` with one `key=value` put in; mappings merge, everything else is replaced."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError("override", override, "expected key=value, such as run.steps=3")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]  # type: ignore[index,call-overload]
    except (yaml.YAMLError, *MISPLACED) as error:
        raise ConfigError(key, text, f"expected a YAML value: {_first_line(error)}") from error
    if _paths().get(key) is str and not isinstance(value, str):
        value = text  # `run.name=7` means the text
    try:
        OmegaConf.update(document, key, value)
    except MISPLACED as error:
        raise ConfigError(key, value, f"cannot be set there: {_first_line(error)}") from error
    return document


def _record(kind: type[Record], raw: object, key: str) -> Record:
    """The frozen record `kind` of a mapping; `key` is its path ("" for the root)."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if not isinstance(raw, dict):
        raise ConfigError(key or "CONFIG", raw, f"expected a mapping with the keys {', '.join(fields)}")
    for name in raw:
        if name not in fields:
            raise ConfigError(_join(key, str(name)), raw[name], _unknown(str(name), key, list(fields)))
    values: dict[str, object] = {}
    for name, hint in get_type_hints(kind).items():
        if name in raw:
            values[name] = _value(hint, raw[name], _join(key, name), fields[name].default)
        elif fields[name].default is fields[name].default_factory is dataclasses.MISSING:
            wanted = EXPECTED.get(hint) or f"a mapping with the keys {', '.join(_keys(hint))}"
            raise ConfigError(_join(key, name), None, f"is missing: expected {wanted}")
    return kind(**values)


def _value(hint: Any, raw: object, key: str, default: object = dataclasses.MISSING) -> object:
    """`raw` as a value of the type `hint`."""
    if dataclasses.is_dataclass(hint):
        return _record(hint, raw, key)  # type: ignore[arg-type]
    if get_origin(hint) in (Union, types.UnionType):
        return None if raw is None else _value(get_args(hint)[0], raw, key)
    if get_origin(hint) is tuple:
        if not isinstance(raw, list):
            raise ConfigError(key, raw, f"expected a list{_of(get_args(hint)[0])}")
        return tuple(_value(get_args(hint)[0], entry, f"{key}[{index}]") for index, entry in enumerate(raw))
    if get_origin(hint) is dict:
        if not isinstance(raw, dict) or not all(isinstance(name, str) for name in raw):
            raise ConfigError(key, raw, "expected a mapping of names to values")
        return raw
    return _scalar(hint, raw, key, default)


def _scalar(hint: type, raw: object, key: str, default: object) -> object:
    """`raw` as bool, int, float or str: a whole number may stand for a float, nothing else is converted."""
    if hint is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if isinstance(raw, hint) and isinstance(raw, bool) == (hint is bool):
        return raw
    example = "" if default in (dataclasses.MISSING, "") else f", such as {_yaml_word(default)}"
    raise ConfigError(key, raw, f"expected {EXPECTED[hint]}{example}")


def _unknown(name: str, parent: str, valid: list[str]) -> str:
    """What to say about the unknown key `name` in the section `parent`."""
    near = [_join(parent, word) for word in difflib.get_close_matches(name, valid, n=1)]
    elsewhere = [path for path in _paths() if path.rpartition(".")[2] == name]
    suggestion = near or elsewhere or [_join(parent, word) for word in difflib.get_close_matches(name, valid, 1, 0.0)]
    hint = f"did you mean {suggestion[0]}? " if suggestion else ""
    return f"is not a key; {hint}the keys of {parent or 'a configuration'} are {', '.join(valid)}"


@cache
def _paths() -> dict[str, Any]:
    """Every dotted key path of Config with its type; lists are not entered."""

    def walk(kind: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, hint in get_type_hints(kind).items():
            yield _join(prefix, name), hint
            if dataclasses.is_dataclass(hint):
                yield from walk(hint, _join(prefix, name))

    return dict(walk(Config, ""))


def _escaped(value: Any) -> Any:
    """`value` with its texts such that OmegaConf does not read `${...}` in them as a reference."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value) if "${" in value else value
    if isinstance(value, dict):
        return {name: _escaped(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(entry) for entry in value]
    return value


def _of(kind: Any) -> str:
    """The words for a list's entries."""
    if kind is int:
        return " of whole numbers, such as [0, 1]"
    return " of texts, such as ['...']" if kind is str else f" of mappings with the keys {', '.join(_keys(kind))}"


def _keys(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _yaml_word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
