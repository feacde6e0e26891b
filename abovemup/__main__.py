"""`abovemup`, and `python -m abovemup`. Nothing is imported before Ctrl-C is seen to."""

import os
import signal
from types import FrameType


def main() -> None:
    """The console script: what was typed ends with the exit code that README lists."""
    signal.signal(signal.SIGINT, _interrupt)
    from abovemup.cli import main as command_line

    command_line.main()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Python drops a KeyboardInterrupt that falls into a destructor, and imports are full of them.

    So one that falls into an import ends the process at once: until a run has handlers of its own nothing is at stake.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"abovemup: interrupted\n")
            os._exit(128 + signum)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
