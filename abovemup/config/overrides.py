"""What was typed: `group=choice` and `key=value` in Hydra's grammar, with our numbers; everything else is refused."""

import re
from dataclasses import dataclass, field
from typing import Any

from abovemup.config.conf import GROUPS, Choices
from abovemup.config.diff import leaves
from abovemup.config.errors import RequestError
from abovemup.config.keys import SECTIONS, did_you_mean, keys, unknown_key

_NUMBERISH = re.compile(r"[+-]?[\d.]+\s*(\^|\*\*)\s*[+-]?[\d.]+(tok)?")  # what Hydra's grammar rejects or takes as text


@dataclass
class Asked:
    groups: dict[str, str] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)


def parse(overrides: list[str], choices: Choices) -> Asked:
    """Sorts overrides into group choices and key values. Raises RequestError, naming the nearest right name."""
    typed = Asked()
    for text in overrides:
        key, value = _split(text, choices)
        section, _, rest = key.partition(".")
        if key in typed.groups or key in typed.keys:
            raise RequestError(f"{key} is given twice: keep one.")
        if key in GROUPS:
            if value not in choices[key]:
                hint = did_you_mean(value, choices[key])
                raise RequestError(f"{key}={value}: no such choice.{hint} Choices: {', '.join(choices[key])}.")
            typed.groups[key] = value
        elif section in GROUPS and rest == "name":
            raise RequestError(f"{text}: the name follows the choice. Use {section}=...")
        elif section not in SECTIONS:
            raise RequestError(unknown_key(key))
        else:  # within a section, the schema finds what is unknown
            typed.keys |= leaves({key: _value(key, value)})
    return typed


def _split(text: str, choices: Choices) -> tuple[str, str]:
    if text.startswith("~"):
        raise RequestError(f"{text}: nothing can be deleted. Set the key to another value (null opens it).")
    key, equals, value = text.partition("=")
    key = key.strip().lstrip("+").strip()
    if not equals or not key:
        raise RequestError(f"{text}: not KEY=VALUE.{_bare_word(text, choices)}")
    return key, value.strip()


def _bare_word(text: str, choices: Choices) -> str:
    if text in GROUPS:
        return f" Choose one of {', '.join(choices[text])}: {text}=..."
    if text in SECTIONS:
        return f" Set a key in it: {text}.KEY=..."
    named = [f"{group}.{name}" for group in GROUPS for name in choices[group]]
    if "." not in text and (near := did_you_mean(text, named)):
        return near.replace(".", "=")
    return did_you_mean(text, [*keys(), *GROUPS]).replace("?", "=...?")


def _value(key: str, text: str) -> Any:
    """The value as Hydra's grammar reads it; our numbers, and text that the grammar rejects, as they stand."""
    if _NUMBERISH.fullmatch(text):
        return text
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    literal = keys().get(key) in (str, str | None)
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
