"""Ctrl-C and SIGTERM: the first asks the loop to stop and keep what it has, a second Ctrl-C ends at once."""

import signal
from types import FrameType, TracebackType


class Stop:
    """Within `with Stop() as stop:` a signal sets `stop.signum`; the loop looks at `stop()` between micro-batches.

    Before `graceful()` is called there is nothing to keep: a signal then raises KeyboardInterrupt or SystemExit(143).
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._graceful = False
        self._before: dict[int, object] = {}

    def __call__(self) -> bool:
        return self.signum is not None

    def graceful(self) -> None:
        self._graceful = True

    @property
    def exit_code(self) -> int:
        return 128 + (self.signum or 0)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # A second signal reaches the default action, which ends the process even inside a long kernel.
        if not self._graceful:
            if signum == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + signum)
        self.signum = signum
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __enter__(self) -> "Stop":
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
