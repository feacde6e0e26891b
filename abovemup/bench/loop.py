"""The training loop with all its logging against a bare loop, in turns within one run."""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console

from abovemup.bench.ratio import Ratio, clock, seconds
from abovemup.config.compose import compose
from abovemup.data.corpus import open_corpus
from abovemup.tracking.terminal import Terminal
from abovemup.training.device import placed
from abovemup.training.run import Leg
from abovemup.training.signals import Stop
from abovemup.training.trainer import Trainer

BLOCK = 10  # steps from one measurement of the norms to the next: the default interval
# The default run. Evaluations and checkpoints are left out, as in the `tokens_per_second` that a run logs.
RUN = ("tracking=wandb", "tracking.mode=offline", f"norms.every={BLOCK}", "eval.every=0", "checkpoint.every=0")


def loop(blocks: int = 30, run: Sequence[str] = RUN) -> Ratio:
    """tokens/s of a run that writes metrics.jsonl, the terminal's lines in a pipe and W&B's offline log, over those
    of a bare loop with the same model, data and optimizer.

    W&B's helper process works all the time, so that it takes from both what it takes of a machine without a free core.
    """
    ours, peer = (trainer([*run, f"train.steps={(blocks + 1) * BLOCK + 1}"]) for _ in range(2))
    turns = Turns(ours, peer)
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "pipe", "w") as pipe:
        terminal = Terminal(Console(file=pipe), "bench", ours.exp.train.steps, ours.batch_tokens)
        Leg(ours, Path(folder), turns, terminal, None).run(None)
    tokens = BLOCK * ours.batch_tokens
    full, bare = tokens / block(turns.full), tokens / block(turns.bare)
    name = f"training with its logging over a bare loop, {ours.exp.model.name} model"
    return Ratio(name, full, bare, "tokens/s", 0.97, at_least=True)


def trainer(overrides: Sequence[str]) -> Trainer:
    exp = placed(compose(list(overrides)))
    torch.set_num_threads(exp.train.threads)
    return Trainer(exp, open_corpus(exp, lambda text: print(text, file=sys.stderr)))


def block(seconds: Sequence[float]) -> float:
    """Seconds of BLOCK usual steps: the median of each place in a block, for one of them has the norms.

    The first block warms up.
    """
    return sum(statistics.median(seconds[BLOCK + place :: BLOCK]) for place in range(BLOCK))


class Turns(Stop):
    """The training loop asks it before each step whether to stop. It never says so, but notes how long the step
    before took and lets the bare loop take one: whatever else slows the machine slows both."""

    def __init__(self, ours: Trainer, peer: Trainer) -> None:
        super().__init__()
        self.trainer, self.peer = ours, peer
        self.full: list[float] = []  # seconds of each step
        self.bare: list[float] = []
        self.began = 0.0

    def __call__(self) -> bool:
        now = clock(self.trainer.device)
        if self.trainer.t:
            self.full.append(now - self.began)
            self.bare.append(seconds(self.trainer.device, lambda: bare_step(self.peer, self.trainer.t)))
        self.began = clock(self.trainer.device)
        return False


def bare_step(peer: Trainer, t: int) -> None:
    """Step t with nothing around it."""
    size = peer.exp.train.batch_size
    batch = peer.corpus.batch((t - 1) * size, size).to(peer.device)
    logits = peer.model(batch[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    peer.optimizer.step()
    peer.optimizer.zero_grad(set_to_none=True)
