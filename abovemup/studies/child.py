"""A cell's process, wherever it was started."""

import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from abovemup.config.errors import RequestError
from abovemup.studies.board import look, settings, until
from abovemup.studies.cells import Cell, place
from abovemup.training.checkpoint import choose


def begin(environment: dict[str, str], *cell: Any) -> NoReturn:
    """What a process that was just forked makes its own, before it trains."""
    os.setpgid(0, 0)  # Ctrl-C reaches it through the study, once
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_end_with_the_study, daemon=True).start()
    train(*cell)


def _end_with_the_study() -> None:
    study = multiprocessing.parent_process()
    assert study is not None
    study.join()
    os.kill(os.getpid(), signal.SIGTERM)  # it keeps a checkpoint


def train(study: Path, cell: Cell, config_dir: Path | None, nproc: int) -> NoReturn:
    """Train a cell from where it stands, and exit with the code of `abovemup train`. All it says goes to its log."""
    run, status = place(study, cell), look(study, cell).status
    command = ["abovemup", "train", *([] if config_dir is None else [f"--config-dir={config_dir}"])]
    command += [f"--nproc={nproc}"] if nproc > 1 else []
    if (run / "config.yaml").is_file() and status in ("unfinished", "failed"):
        command += [f"--resume={run}", f"train.tokens={cell.tokens}"]
    else:
        shutil.rmtree(run, ignore_errors=True)  # damaged, diverged, or ended before its first line
        command += [*_branch(study, cell), *cell.overrides, f"run.dir={run}"]
        if "train.threads" not in settings(cell):
            command.append(f"train.threads={cell.threads}")  # whatever the machine has
    with open(study / "logs" / f"{cell.name}.log", "ab", buffering=0) as log:
        log.write(f"$ {' '.join(command)}{until(cell)}\n".encode())
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.argv = command
    runpy.run_module("abovemup", run_name="__main__")
    raise AssertionError("it exits")


def _branch(study: Path, cell: Cell) -> list[str]:
    """Off the constant run, where the study has it and it has kept the point from which this one decays."""
    name, _, tokens = cell.trunk.partition("@")
    with suppress(RequestError):
        if tokens and choose(study / "runs" / name, int(tokens) * cell.steps // cell.tokens):
            return [f"--branch={study / 'runs' / cell.trunk}"]
    return []
