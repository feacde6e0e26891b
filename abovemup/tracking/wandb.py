"""W&B, at arm's length: a helper process follows metrics.jsonl and uploads it.

wandb waits for networks, hooks `sys.exit` and prints. In a process of its own it can hang, crash or be killed
without the run noticing, costs the training loop nothing a row, and finishes the upload when the run is killed.
What is uploaded is what metrics.jsonl holds, from its first row: so each leg of a resumed run is a whole curve.
"""

import importlib.util
import json
import netrc
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from abovemup.config.errors import RequestError, RunFailed
from abovemup.config.io import write_whole
from abovemup.config.schema import Experiment, Tracking
from abovemup.tracking.records import Record, Summary, dumps

LIMIT = 8.0  # seconds that a run waits for W&B at its end: under 10 with everything before it
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


def logged_in() -> bool:
    """Whether this machine has a key for W&B, in the environment or in netrc. Does not import wandb."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    base = os.environ.get("WANDB_BASE_URL")
    try:
        known = netrc.netrc(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(host in known.hosts for host in ([urlsplit(base).netloc] if base else HOSTS))


def resolve_mode(tracking: Tracking, note: Callable[[str], None]) -> str:
    """`online`, `offline` or `disabled`; says in one line what the user would not expect."""
    mode: str = "disabled" if tracking.name == "local" else tracking.mode
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE", "")
        if mode not in ("online", "offline", "disabled"):
            mode = "online" if logged_in() else "offline"
    if mode != "disabled" and importlib.util.find_spec("wandb") is None:
        note("W&B: wandb is not installed, so this run is logged locally only (tracking=local says so on purpose).")
        return "disabled"
    if mode == "online" and not logged_in():
        note("W&B: no key on this machine (`wandb login` sets one), so this run is logged offline.")
        return "offline"
    return mode


class WandbSink:
    """Starts the helper of one leg of the run in `run_dir`, whose config.yaml and metrics.jsonl it reads.

    Does nothing under `tracking=local` or `tracking.mode=disabled`. `limit`: seconds `close` waits at most.
    """

    def __init__(
        self, run_dir: Path, experiment: Experiment, note: Callable[[str], None], limit: float = LIMIT
    ) -> None:
        self.run_dir, self.note, self.limit = run_dir, note, limit
        self.mode = resolve_mode(experiment.tracking, note)
        self.process: subprocess.Popen[bytes] | None = None
        self.url: str | None = None
        self._heard = b""
        if self.mode == "disabled":
            return
        try:
            leg = next_leg(run_dir)
            self.id = f"{leg['id']}-{leg['leg']}"
            self.process = start_helper(run_spec(run_dir, experiment.tracking, self.mode, self.id, leg["leg"]))
        except OSError as error:
            self.mode = "disabled"
            note(f"W&B: could not start ({error.strerror}); metrics.jsonl has everything.")
        if self.mode == "offline":
            note(f"W&B: {self.describe()}")

    def log(self, record: Record) -> None:
        """The helper reads the row from metrics.jsonl; here is only listened to what it says."""
        self._hear()

    def close(self, summary: Summary) -> None:
        """Tell the helper that the run is over and wait for it, at most `limit` seconds."""
        if self.process is None:
            return
        process, deadline = self.process, time.monotonic() + self.limit
        try:
            assert process.stdin is not None
            process.stdin.write(dumps(uploaded(summary)).encode() + b"\n")
            process.stdin.close()
        except (OSError, ValueError):
            pass  # it is gone, and has said why
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self._hear()
        self.process = None
        if process.poll() is None:
            process.kill()  # wandb's service watches the helper and goes with it
            process.wait()
            self.note(f"W&B did not finish in {self.limit:g} s and was stopped; {self._push()} uploads the whole run.")

    def describe(self) -> str:
        """One line: where the run is to be seen in W&B."""
        if self.mode == "disabled":
            return "off"
        if self.mode == "online" and self.url:
            return self.url
        if self.mode in ("online", "failed"):
            return f"not reached; {self._push()} uploads the run"
        folder = shlex.quote(str(self.run_dir / "wandb"))
        return f"offline; `wandb sync {folder}/offline-run-*-{self.id}` uploads it (after `wandb login`)"

    def _push(self) -> str:
        return f"`abovemup runs push {shlex.quote(str(self.run_dir))}`"

    def _hear(self) -> None:
        """Take what the helper has said since, without waiting."""
        if self.process is None or self.process.stdout is None:
            return
        try:
            while chunk := os.read(self.process.stdout.fileno(), 65536):
                self._heard += chunk
        except BlockingIOError:
            pass
        *lines, self._heard = self._heard.split(b"\n")
        for said in map(json.loads, lines):
            self.mode, self.url = said.get("mode", self.mode), said.get("url", self.url)
            if "note" in said:
                self.note(f"W&B: {said['note']}")


def push(run_dir: Path) -> str:
    """Upload the whole run in `run_dir` from config.yaml, metrics.jsonl and summary.json; returns its URL.

    Pushing again replaces the earlier push. Raises RequestError when the folder is no run, or there is no wandb or
    no key; RunFailed when W&B cannot be reached in 8 s, or the upload breaks off.
    """
    for name in ("config.yaml", "metrics.jsonl", "summary.json"):
        if not (run_dir / name).is_file():
            raise RequestError(f"{run_dir} is not a run: it has no {name}.")
    if importlib.util.find_spec("wandb") is None:
        raise RequestError("wandb is not installed: `pip install wandb`, then push again.")
    if not logged_in():
        raise RequestError("W&B: no key on this machine. `wandb login`, then push again.")
    config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    leg = next_leg(run_dir, advance=False)
    spec = run_spec(run_dir, Tracking(**config["tracking"]), "online", f"{leg['id']}-push", leg["leg"])
    process = start_helper(spec | {"summary": uploaded(summary), "fall_back": False}, blocking=True)
    said: dict[str, str] = {}
    for line in process.communicate()[0].splitlines():
        said |= json.loads(line)
    if process.returncode or "url" not in said:
        raise RunFailed(f"W&B: {said.get('note', 'the upload failed')}; nothing in {run_dir} was changed.")
    return said["url"]


def next_leg(run_dir: Path, advance: bool = True) -> dict[str, Any]:
    """The run's W&B id, made at its first leg and kept in the run directory, and the number of this leg."""
    path = run_dir / "wandb" / "run.json"
    try:
        leg = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        leg = {"id": secrets.token_hex(4), "leg": 0}
    leg["leg"] += advance
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(leg) + "\n")
    return dict(leg)


def run_spec(run_dir: Path, tracking: Tracking, mode: str, run_id: str, leg: int) -> dict[str, Any]:
    """What the helper has to know; it holds no key."""
    run_dir = run_dir.resolve()
    return vars(tracking) | {
        "run_dir": str(run_dir),
        "mode": mode,
        "id": run_id,
        "name": run_dir.name if leg <= 1 else f"{run_dir.name} (leg {leg})",
        "group": tracking.group or run_dir.name,
        "leg": leg,
        "parent": os.getpid(),
        "summary": None,  # None: the run goes on, follow it
        "fall_back": True,
    }


def uploaded(summary: Summary) -> dict[str, Any]:
    """The part of a summary that is numbers and words, not text to read."""
    return {key: value for key, value in summary.items() if key not in ("sample", "wandb", "dir", "command")}


def start_helper(spec: dict[str, Any], blocking: bool = False) -> subprocess.Popen[bytes]:
    """Start the helper in a session of its own: a Ctrl-C in the terminal is not for it."""
    # What an outer W&B run or agent left in the environment belongs to another run.
    foreign = ("SERVICE", "RUN_ID", "RESUME", "RUN_GROUP", "NAME", "MODE", "PROJECT", "TAGS")
    env = {key: value for key, value in os.environ.items() if key not in [f"WANDB_{name}" for name in foreign]}
    here = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), here)))
    env.setdefault("WANDB_ERROR_REPORTING", "false")
    process = subprocess.Popen(
        # -P: a file called wandb.py in the working directory is not W&B.
        [sys.executable, "-P", "-m", "abovemup.tracking.wandb_helper", json.dumps(spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=env,
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), blocking)
    return process
