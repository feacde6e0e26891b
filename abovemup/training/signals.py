"""Ctrl-C and SIGTERM: the first asks the loop to stop and keep what it has, a second Ctrl-C ends at once."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class Stop:
    """Within `with Stop() as stop:` a signal sets `stop.signum`; the loop looks at `stop()` between micro-batches.

    A second Ctrl-C is noticed by a thread, which need not wait, as Python's handlers do, for a long kernel to return.
    With several ranks `agree` makes of the signals of all the largest, so that all stop at once.
    Before `graceful()` is called there is nothing to keep: a signal then raises KeyboardInterrupt or SystemExit(143).
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.agree: Callable[[int], int] = lambda signum: signum
        self._graceful = False
        self._before: dict[int, object] = {}

    def __call__(self) -> bool:
        if agreed := self.agree(self.signum or 0):
            self.signum = agreed
        return bool(agreed)

    def graceful(self) -> None:
        self._graceful = True

    @property
    def exit_code(self) -> int:
        return 128 + (self.signum or 0)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum  # also before it raises: Python drops what is raised in a destructor
        if not self._graceful:
            if signum == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + signum)

    def _watch(self, reader: int) -> None:
        """Read the number of each signal as it comes; ends with the pipe's other end."""
        seen = False
        while byte := os.read(reader, 1):
            if seen and byte[0] == signal.SIGINT:
                os._exit(128 + signal.SIGINT)
            seen |= byte[0] in self._before
        os.close(reader)

    def __enter__(self) -> "Stop":
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, self._handle)
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writer)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
