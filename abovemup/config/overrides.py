"""What was typed: `group=choice` and `key=value` in Hydra's grammar, with our numbers; everything else is refused."""

import re
from dataclasses import dataclass, field
from typing import Any

from abovemup.config.conf import GROUPS, Choices
from abovemup.config.errors import RequestError
from abovemup.config.keys import SECTIONS, did_you_mean, is_key, keys, nearest, takes_text, unknown_key

_NUMBERISH = re.compile(r"[+-]?[\d.]+\s*(\^|\*\*)\s*[+-]?[\d.]+(tok)?")  # what Hydra's grammar rejects or takes as text


@dataclass
class Typed:
    groups: dict[str, str] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)


def parse(overrides: list[str], choices: Choices) -> Typed:
    """Sorts overrides into group choices and key values. Raises RequestError, naming the nearest right name."""
    typed = Typed()
    for text in overrides:
        key, value = _split(text, choices)
        if key in typed.groups or key in typed.keys:
            raise RequestError(f"{key} is given twice: keep one.")
        if key in GROUPS:
            typed.groups[key] = _choice(key, value, choices)
        else:
            _check_key(key, text)
            typed.keys[key] = _value(key, value)
    return typed


def _split(text: str, choices: Choices) -> tuple[str, str]:
    if text.startswith("~"):
        raise RequestError(f"{text}: nothing can be deleted. Set the key to another value (null opens it).")
    key, equals, value = text.partition("=")
    key = key.lstrip("+").strip() if key.startswith(("+", "++")) else key.strip()
    if not equals or not key:
        raise RequestError(f"{text}: not KEY=VALUE.{_bare_word(text, choices)}")
    if re.match(r"hydra\b", key):
        raise RequestError(f"{text}: Hydra only composes here. The run's own folder is run.dir.")
    return key, value.strip()


def _bare_word(text: str, choices: Choices) -> str:
    if text in GROUPS:
        return f" Choose one of {', '.join(choices[text])}: {text}=..."
    if text in SECTIONS:
        return f" Set a key in it: {text}.KEY=..."
    named: dict[str, list[str]] = {}
    for group in GROUPS:
        for name in choices[group]:
            named.setdefault(name, []).append(f"{group}={name}")
    if near := nearest(text, list(named)):
        return f" Did you mean {' or '.join(named[near[0]])}?"
    return did_you_mean(text, [*keys(), *GROUPS]).replace("?", "=...?")


def _choice(group: str, name: str, choices: Choices) -> str:
    if name not in choices[group]:
        hint = did_you_mean(name, choices[group])
        raise RequestError(f"{group}={name}: no such choice.{hint} Choices: {', '.join(choices[group])}.")
    return name


def _check_key(key: str, text: str) -> None:
    if is_key(key):
        return
    group, _, rest = key.partition(".")
    if group in GROUPS and rest == "name":
        raise RequestError(f"{text}: the name follows the choice. Use {group}=...")
    if key in SECTIONS or any(known.startswith(key + ".") for known in keys()):
        below = (known.removeprefix(key + ".") for known in keys() if known.startswith(key + "."))
        inside = dict.fromkeys(known.partition(".")[0] for known in below)
        raise RequestError(f"{text}: {key} is a section. Set a key in it: {key}.{{{','.join(inside)}}}=...")
    raise RequestError(unknown_key(key))


def _value(key: str, text: str) -> Any:
    """The value as Hydra's grammar reads it; our numbers, and text that the grammar rejects, as they stand."""
    if _NUMBERISH.fullmatch(text):
        return text
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    kind = keys().get(key)
    literal = kind is not None and takes_text(kind)
    try:
        override = OverridesParser.create().parse_override(f"{key}={text}")
    except (HydraException, ValueError) as error:  # ValueError: an integer of 5000 digits
        if literal:
            return text
        raise RequestError(f"{key}={text}: {str(error).splitlines()[0]}.") from error
    if override.is_sweep_override():
        raise RequestError(f"{key}={text}: one value, please; quote a text with a comma: {key}=\"'{text}'\".")
    value = override.value()
    if literal and value is not None and not isinstance(value, str | list | dict):
        return text  # run.name=007 stays 007
    return value
