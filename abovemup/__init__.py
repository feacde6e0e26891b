"""abovemup: initialise, update and scale a language model so that one learning rate fits every size."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`abovemup.load_runs`, without pandas in whatever else imports abovemup."""
    if name == "load_runs":
        from abovemup.analysis import runs

        return runs.load_runs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
