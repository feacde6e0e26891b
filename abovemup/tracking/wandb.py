"""W&B, at arm's length: a helper process follows metrics.jsonl and uploads it.

wandb waits for networks, hooks `sys.exit` and prints. In a process of its own it can hang, crash or be killed
without the run noticing, costs the training loop nothing a row, and finishes the upload when the run is killed.
What is uploaded is what metrics.jsonl holds, from its first row: so each leg of a resumed run is a whole curve,
and what W&B did not get, `abovemup runs push` sends.
"""

import configparser
import importlib.util
import json
import netrc
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from abovemup.config.errors import RequestError, RunFailed
from abovemup.config.io import write_whole
from abovemup.config.schema import Experiment, Tracking
from abovemup.tracking.records import Record, Summary

LIMIT = 8.0  # seconds that a run waits for W&B at its end: under 10 with everything before it
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


def logged_in() -> bool:
    """Whether this machine has a key for W&B, in the environment or, for the server that wandb would ask, in netrc.

    Does not import wandb. `wandb login --host` keeps the server in wandb's own settings; those of a project are in
    wandb/settings of the working directory.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    user = os.environ.get("WANDB_CONFIG_DIR") or os.path.expanduser("~/.config/wandb")
    settings = configparser.ConfigParser()
    try:
        settings.read([f"{user}/settings", "wandb/settings"])
        base = os.environ.get("WANDB_BASE_URL") or settings.get("default", "base_url", fallback=f"https://{HOSTS[0]}")
        known = netrc.netrc(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
    except (OSError, ValueError, configparser.Error, netrc.NetrcParseError):
        return False
    host = urlsplit(base).netloc
    return any(name in known.hosts for name in (HOSTS if host in HOSTS else [host]))


def resolve_mode(tracking: Tracking, note: Callable[[str], None]) -> str:
    """`online`, `offline` or `disabled`; says in one line what the user would not expect."""
    mode: str = "disabled" if tracking.name == "local" else tracking.mode
    if mode == "auto":
        said, likely = os.environ.get("WANDB_MODE"), "online" if logged_in() else "offline"
        mode = said if said in ("online", "offline", "disabled") else likely
    if mode != "disabled" and importlib.util.find_spec("wandb") is None:
        note("W&B: wandb is not installed, so this run is logged locally only (tracking=local says so on purpose).")
        return "disabled"
    if mode == "online" and not logged_in():
        note("W&B: no key on this machine (`wandb login` sets one), so this run is logged offline.")
        return "offline"
    return mode


class WandbSink:
    """Starts the helper of one leg of the run in `run_dir`, whose config.yaml, metrics.jsonl and summary.json it reads.

    Does nothing under `tracking=local` or `tracking.mode=disabled`. `where`: the run's URL, or what to do to see it in
    W&B; None when it is not sent there.
    """

    def __init__(self, run_dir: Path, experiment: Experiment, note: Callable[[str], None]) -> None:
        self.run_dir, self.note = run_dir, note
        self.where: str | None = None
        self.lost = False
        self.process: subprocess.Popen[bytes] | None = None
        self.said: Iterable[str] = ()
        mode = resolve_mode(experiment.tracking, note)
        if mode == "disabled":
            return
        try:
            run_id = next_id(run_dir)
            self.process, self.said = start_helper(run_dir, mode, run_id)
        except OSError as error:
            self._lost(f"could not start ({error.strerror})")
            return
        if mode == "offline":
            folder = shlex.quote(str(run_dir / "wandb"))
            self.where = f"offline; `wandb sync {folder}/offline-run-*-{run_id}` uploads it (after `wandb login`)"
            note(f"W&B: {self.where}")

    def log(self, record: Record) -> None:
        """The helper reads the row from metrics.jsonl; here is only looked at what it has said since."""
        self._listen()

    def close(self, summary: Summary) -> None:
        """Tell the helper that the run is over, its summary.json written, and wait for it, at most LIMIT seconds."""
        if self.process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=LIMIT)  # closes its stdin
        self._listen()
        if self.process.returncode is None:
            self.process.kill()  # wandb's service watches the helper and goes with it
            self.process.wait()
            self._lost(f"not finished in {LIMIT:g} s")
        elif self.process.returncode and not self.lost:  # killed, or it could not even start
            self._lost(f"the upload ended with code {self.process.returncode}")
        self.process = None

    def _listen(self) -> None:
        for line in map(str.strip, self.said):
            if line.startswith("http"):
                self.where = line
                self.note(f"W&B: {line}")
            else:
                self._lost(line)

    def _lost(self, why: str) -> None:
        self.lost = True
        self.where = f"{why}; `abovemup runs push {shlex.quote(str(self.run_dir))}` uploads the whole run"
        self.note(f"W&B: {self.where}")


def push(run_dir: Path) -> str:
    """Upload the whole run in `run_dir` from config.yaml, metrics.jsonl and summary.json; returns its URL.

    Pushing again replaces the earlier push. Raises RequestError when the folder is no run, or there is no wandb or
    no key; RunFailed when W&B cannot be reached, or the upload breaks off.
    """
    for name in ("config.yaml", "metrics.jsonl", "summary.json"):
        if not (run_dir / name).is_file():
            raise RequestError(f"{run_dir} is not a run: it has no {name}.")
    if importlib.util.find_spec("wandb") is None:
        raise RequestError("wandb is not installed: `pip install wandb`, then push again.")
    if not logged_in():
        raise RequestError("W&B: no key on this machine. `wandb login`, then push again.")
    process, file = start_helper(run_dir, "online", next_id(run_dir, "push"))
    process.communicate()
    said = file.read().splitlines()
    if process.returncode or not said:
        raise RunFailed(f"W&B: {said[-1] if said else 'the upload failed'}; nothing in {run_dir} was changed.")
    return said[0]


def next_id(run_dir: Path, leg: str | None = None) -> str:
    """`<id>-<leg>`: an id of the run's own, kept in its folder, and the number of the next leg unless one is named."""
    path = run_dir / "wandb" / "run.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        run = {"id": secrets.token_hex(4), "leg": 0}
    run["leg"] += leg is None
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(run) + "\n")
    return f"{run['id']}-{leg or run['leg']}"


def start_helper(run_dir: Path, mode: str, run_id: str) -> tuple[subprocess.Popen[bytes], IO[str]]:
    """Start the helper in a session of its own (a Ctrl-C in the terminal is not for it), which ends after its stdin.

    In the file are, line by line, the run's URL and why the helper gave up.
    """
    # What an outer W&B run or agent left in the environment belongs to another run.
    foreign = ("SERVICE", "RUN_ID", "RESUME", "RUN_GROUP", "NAME", "MODE", "PROJECT", "TAGS")
    env = {key: value for key, value in os.environ.items() if key not in [f"WANDB_{name}" for name in foreign]}
    env.setdefault("WANDB_ERROR_REPORTING", "false")
    arguments = (str(run_dir.resolve()), mode, run_id, str(os.getpid()))
    said = open(run_dir / "wandb" / f"{run_id}.log", "w+", encoding="utf-8")  # noqa: SIM115
    process = subprocess.Popen(
        # -P: a file called wandb.py in the working directory is not W&B.
        [sys.executable, "-P", "-m", "abovemup.tracking.wandb_helper", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=env,
    )
    return process, said
