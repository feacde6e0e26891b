"""How long a person waits for `abovemup --help`."""

import statistics
import subprocess
import sys
from functools import partial

from abovemup.bench.ratio import Ratio, in_turns

HELP = ["-c", "from abovemup.cli.main import main; main()", "--help"]
LIBRARIES = ["-c", "import typer, rich"]


def startup(pairs: int = 15) -> Ratio:
    """The time of `abovemup --help` over that of importing what draws it, in turns."""
    ours, peer = in_turns([partial(_run, HELP), partial(_run, LIBRARIES)], pairs, statistics.median)
    return Ratio("abovemup --help over importing typer and rich", ours, peer, "s", 3)


def _run(arguments: list[str]) -> None:
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
