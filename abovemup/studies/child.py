"""A cell's process: `abovemup`, asked to stop (it keeps a checkpoint) when the study that started it is gone."""

import os
import runpy
import signal
import sys
import threading
import time


def watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=watch, args=(int(sys.argv.pop(1)),), daemon=True).start()
    runpy.run_module("abovemup", run_name="__main__")
