"""What a person reads when the command line was wrong."""

from difflib import get_close_matches

from typer.exceptions import TyperException


def plain(message: str) -> str:
    """The message without characters that would move the cursor or colour the terminal."""
    return "".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in message)


def usage(error: TyperException, arguments: list[str]) -> str:
    """One line about a command line that does not parse; nothing when the help has been printed instead.

    With the key that was probably meant by an option that is none: `--lr 0.1` is `optimizer.lr=0.1` here.
    """
    from abovemup.config.keys import keys, nearest

    message, option = error.format_message(), str(getattr(error, "option_name", ""))
    near = get_close_matches(option, getattr(error, "possibilities", None) or [], 1, 0.75)
    if option and not near and arguments[:1] in (["train"], ["show"], ["explain"], ["coordcheck"]):
        meant = nearest(option.lstrip("-").replace("-", "_"), list(keys()))
        if meant:
            message += f". Settings are keys: did you mean {' or '.join(f'{key}=...' for key in meant)}?"
    return message
