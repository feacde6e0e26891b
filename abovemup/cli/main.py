"""The command line: one thin file per verb, heavy imports inside them, and one place where errors become exit codes."""

import contextlib
import errno
import io
import os
import signal
import sys
import traceback
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.exceptions import TyperException

from abovemup import __version__
from abovemup.cli.train import TrainCommand
from abovemup.config.errors import RequestError, RunFailed

# A verb is the function, or the app of several, in the module of its name.
WITH_SETTINGS = ("train", "show", "explain", "coordcheck")  # their help lists the keys
PLAIN = ("generate", "doctor", "sweep", "ablate", "compare", "fit", "predict", "watch", "report", "bench")
SEVERAL = {
    "data": "Make and look at token shards.",
    "runs": "What to do with run directories.",
    "study": "How studies stand.",
}

app = typer.Typer(
    name="abovemup",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # its tracebacks print local variables
    help="How should a language model be initialised, updated and scaled so that one learning rate fits every size?",
)
for verb in (*WITH_SETTINGS, *PLAIN):
    function = getattr(import_module(f"abovemup.cli.{verb}"), verb)
    app.command(verb, cls=TrainCommand if verb in WITH_SETTINGS else None)(function)
for verb, purpose in SEVERAL.items():
    app.add_typer(import_module(f"abovemup.cli.{verb}").app, name=verb, help=purpose)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"abovemup {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", expose_value=False)] = False,
) -> None:
    pass


def _command() -> Any:
    """The whole command line, with `--debug`, which only `_fail` looks at, at every verb."""
    root: Any = typer.main.get_command(app)
    debug = next(option for option in root.params if option.name == "debug")
    groups = [root, *(root.commands[name] for name in SEVERAL)]
    for verb in [command for group in groups for command in group.commands.values()]:
        verb.params.append(debug)
    return root


def main() -> NoReturn:
    """The console script: runs what was typed and exits with the code that README lists."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal in ASCII gets an é as \xe9
    code = run(sys.argv[1:])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A rank: threads of torch that wake up while Python ends would end it by a signal, one time in ten.
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """The exit code of a command. What goes wrong is one or two lines on stderr; `--debug` adds the traceback."""
    try:
        _check_surroundings(arguments)
        command = _command()
        with command.make_context("abovemup", list(arguments)) as context:
            command.invoke(context)
        if sys.stdout is not None:
            sys.stdout.flush()
        return 0
    except typer.Exit as end:
        return end.exit_code
    except TyperException as error:
        message = _usage(error, arguments)
        return _fail(2, message) if message else 2
    except RequestError as error:
        return _fail(2, str(error), arguments)
    except BrokenPipeError:
        # The reader has left (`| head`): nobody to tell, and the interpreter must not flush into nothing at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except SystemExit as end:
        if end.code != 128 + signal.SIGTERM:
            raise
        return _fail(128 + signal.SIGTERM, "terminated")
    except KeyboardInterrupt:
        return _fail(128 + signal.SIGINT, "interrupted")
    except RunFailed as error:
        return _fail(4, str(error), arguments)
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, OSError) and error.strerror:
            text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
            if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR):  # a path that no machine could have made
                return _fail(2, text, arguments)
        return _fail(4, text + ("" if "--debug" in arguments else " (--debug shows the traceback)"), arguments)


def _check_surroundings(arguments: list[str]) -> None:
    try:
        "".join(arguments).encode()
        os.getcwd()
    except UnicodeEncodeError as error:
        raise RequestError("the command line holds bytes that are not UTF-8.") from error
    except FileNotFoundError as error:
        raise RequestError("the working directory is gone.") from error


def _usage(error: TyperException, arguments: list[str]) -> str:
    """About a command line that does not parse; nothing when the help has been printed instead.

    With the key that was probably meant by an option that is none: `--lr 0.1` is `optimizer.lr=0.1` here.
    """
    from abovemup.config.keys import keys, nearest

    message, option = error.format_message(), str(getattr(error, "option_name", ""))
    near = get_close_matches(option, getattr(error, "possibilities", None) or [], 1, 0.75)
    if option and not near and {*WITH_SETTINGS} & {*arguments[:2]}:
        meant = nearest(option.lstrip("-").replace("-", "_"), keys())
        if meant:
            message += f". Settings are keys: did you mean {' or '.join(f'{key}=...' for key in meant)}?"
    return message


def _fail(code: int, message: str, arguments: list[str] | None = None) -> int:
    if arguments and "--debug" in arguments:
        traceback.print_exc()
    # Without characters that would move the cursor or colour the terminal.
    plain = "".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in message)
    with contextlib.suppress(BrokenPipeError):
        print(f"abovemup: {plain}", file=sys.stderr)
    return code
