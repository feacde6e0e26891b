"""What was typed: `group=choice` and `key=value` in Hydra's grammar, with our numbers; everything else is refused."""

from dataclasses import dataclass, field
from typing import Any

from abovemup.config.conf import GROUPS, Choices
from abovemup.config.errors import RequestError
from abovemup.config.keys import SECTIONS, did_you_mean, fields, keys, leaves, nearest, unknown_key


@dataclass
class Asked:
    groups: dict[str, str] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)


def parse(overrides: list[str], choices: Choices) -> Asked:
    """Sorts overrides into group choices and key values. Raises RequestError, naming the nearest right name."""
    typed = Asked()
    for text in overrides:
        if text.startswith("~"):
            raise RequestError(f"{text}: nothing can be deleted. Set the key to another value (null opens it).")
        key, equals, value = (part.strip() for part in text.lstrip("+").partition("="))
        section, _, rest = key.partition(".")
        if not equals or not key:
            raise RequestError(f"{text}: not KEY=VALUE.{_bare_word(text, choices)}")
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


def _bare_word(word: str, choices: Choices) -> str:
    """What a word without a value was probably meant for."""
    typed = {key: f"{key}=..." for key in keys()} | {section: f"{section}.KEY=..." for section in SECTIONS}
    for group, names in choices.items():
        typed |= {group: f"{group}={'|'.join(names)}", **{f"{group}.{name}": f"{group}={name}" for name in names}}
    near = nearest(word, list(typed))
    return f" Did you mean {' or '.join(typed[name] for name in near)}?" if near else ""


def _value(key: str, text: str) -> Any:
    """As Hydra's grammar reads it. What that rejects (2^20, a path with =) is a text; at a text's key, a number too."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(f"{key}={text}")
    except (HydraException, ValueError):  # ValueError: an integer of 5000 digits
        return text
    if override.is_sweep_override():
        raise RequestError(f"{key}={text}: one value, please; quote a text with a comma: {key}=\"'{text}'\".")
    value = override.value()
    literal = key in fields() and fields()[key].type in (str, str | None)
    # run.name=007 stays 007
    return text if literal and value is not None and not isinstance(value, str | list | dict) else value
