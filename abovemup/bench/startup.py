"""How long a person waits for `abovemup --help`."""

import statistics
import subprocess
import sys

import torch

from abovemup.bench.loop import seconds
from abovemup.bench.ratio import Ratio

HELP = ["-c", "from abovemup.cli.main import main; main()", "--help"]
LIBRARIES = ["-c", "import typer, rich"]


def startup(pairs: int = 15) -> Ratio:
    """The time of `abovemup --help` over that of importing what draws it, in turns."""
    times = [(_seconds(HELP), _seconds(LIBRARIES)) for _ in range(pairs + 1)]
    ours, peer = map(statistics.median, zip(*times[1:], strict=True))  # the first pair fills the disk's cache
    return Ratio("abovemup --help over importing typer and rich", ours, peer, "s", 3)


def _seconds(arguments: list[str]) -> float:
    command = [sys.executable, *arguments]
    return seconds(torch.device("cpu"), lambda: subprocess.run(command, check=True, capture_output=True))
