"""What a person reads when the command line was wrong."""

from difflib import SequenceMatcher

from typer.exceptions import TyperException

_NEAR = 0.75


def plain(message: str) -> str:
    """The message without characters that would move the cursor or colour the terminal."""
    return "".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in message)


def usage(error: TyperException, arguments: list[str]) -> str:
    """One line about a command line that does not parse; nothing when the help has been printed instead."""
    kind = type(error).__name__
    if kind == "NoArgsIsHelpError":
        return ""
    if kind == "NoSuchOption":
        return _no_such_option(str(getattr(error, "option_name", "")), getattr(error, "possibilities", None), arguments)
    return error.format_message()


def _no_such_option(option: str, possibilities: list[str] | None, arguments: list[str]) -> str:
    """With the nearest option, or the key that was probably meant: `--lr 0.1` is `optimizer.lr=0.1` here."""
    from abovemup.config.keys import keys, nearest

    name = option.lstrip("-").replace("-", "_")
    near = [other for other in possibilities or [] if SequenceMatcher(None, option, other).ratio() >= _NEAR]
    if near:
        return f"no such option: {option}. Did you mean {near[0]}?"
    meant = nearest(name, list(keys())) if arguments[:1] in (["train"], ["show"]) else []
    if meant:
        return f"no such option: {option}. Settings are keys: did you mean {' or '.join(f'{k}=...' for k in meant)}?"
    return f"no such option: {option}. See abovemup {' '.join(arguments[:1])} --help."
