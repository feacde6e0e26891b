"""What a person sees: a live view on a terminal, plain lines everywhere else."""

import math
import os
import shlex
import sys
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import numpy as np
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from abovemup.tracking.plot import braille
from abovemup.tracking.records import Record, Summary, output_norm

REFRESH = 0.25  # seconds between two frames
LINES = 40  # of a run in a pipe at most, besides evaluations
SILENCE = 600  # seconds after which a line comes anyway


class Terminal:
    """The run `title` of `steps` steps on `console`.

    Live only where the console is a real terminal with a cursor. When the output breaks (`| head`, a lost
    connection) one line on stderr says so, nothing more is shown, and the run goes on.
    """

    def __init__(self, console: Console, title: str, steps: int, tokens_per_step: int) -> None:
        self.console, self.title = console, title
        self.steps, self.step = steps, 0
        self.tokens_per_step = tokens_per_step
        self.tokens, self.losses = array("d"), array("d")  # as numpy reads them without a copy, many times a second
        self.latest: Record = {}
        self.speed: float | None = None
        self.start: tuple[int, float] | None = None  # step and time of this leg's first record
        self.shown = -math.inf
        self.broken = False
        real = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        self.live = Live(console=console, auto_refresh=False) if real else None

    def log(self, record: Record) -> None:
        self.latest |= record
        self.step = int(record["step"])
        self.start = self.start or (self.step, time.monotonic())
        if math.isfinite(record.get("loss", math.nan)):
            self.tokens.append(record["tokens"])
            self.losses.append(record["loss"])
        if speed := record.get("tokens_per_second"):
            self.speed = speed if self.speed is None else 0.9 * self.speed + 0.1 * speed
        waited = time.monotonic() - self.shown
        plain = self.step % max(self.steps // LINES, 1) == 0 or "val/loss" in record or waited > SILENCE
        if self.step == self.steps or (plain if self.live is None else waited >= REFRESH):
            if self.live is not None:
                self._guard(self._draw)
            else:
                self.note("  ".join(f"{name} {value}" for name, value in self._cells(record, si(record["tokens"]))))
            self.shown = time.monotonic()

    def note(self, text: str) -> None:
        """Print a line; above the live view, where there is one."""
        self._guard(lambda: self.console.print(Text(safe(text)), soft_wrap=True))

    def close(self, summary: Summary) -> None:
        """Leave the last frame on the screen and say how the run ended."""
        if self.live is not None and self.live.is_started:
            self._guard(self._draw)
            self._guard(self.live.stop)
        for text in closing_lines(summary):
            self.note(text)

    def _cells(self, record: Record, tokens: str) -> list[tuple[str, str]]:
        """Names and values of what `record` has, in the order of reading."""
        lr = record.get("lr/hidden", next((record[key] for key in record if key.startswith("lr/")), None))
        shown = [
            ("loss", record.get("loss"), "{:.4f}"),
            ("val loss", record.get("val/loss"), "{:.4f}"),
            ("bits/byte", record.get("val/bits_per_byte"), "{:.4f}"),
            ("lr", lr, "{:.4g}"),
            ("output norm", output_norm(record), "{:.4g}"),
            ("MFU", record.get("mfu"), "{:.1%}"),
        ]
        cells = [("step", f"{self.step}/{self.steps}"), ("tokens", tokens)]
        cells += [(name, form.format(value)) for name, value, form in shown if value is not None]
        if self.speed is not None:
            cells.append(("tok/s", si(self.speed)))
        if self.start is not None and self.step > self.start[0]:
            each = (time.monotonic() - self.start[1]) / (self.step - self.start[0])
            cells.append(("ETA", str(timedelta(seconds=round(each * (self.steps - self.step))))))
        return cells

    def _draw(self) -> None:
        assert self.live is not None
        if not self.live.is_started:
            self.live.start()
            self.console.show_cursor(True)  # a killed run must not leave the terminal without one
        self.live.update(self._frame(), refresh=True)

    def _frame(self) -> Group:
        width, height = self.console.size
        width = min(width, 100) - 1
        total, done = self.steps * self.tokens_per_step, self.step * self.tokens_per_step
        cells = self._cells(self.latest, f"{si(done)}/{si(total)}")
        texts = [Text.assemble((name, "dim"), " ", (value, "bold")) for name, value in cells]
        above = Group(
            Text(self.title, style="bold", no_wrap=True, overflow="crop"),
            Padding(ProgressBar(max(total, 1), done, width=width), 0),  # on a line of its own
            Columns(texts, padding=(0, 3)),
        )
        room = min(height - len(self.console.render_lines(above)) - 3, 10)
        if room < 3 or width < 20 or not self.losses or not self.console.encoding.startswith("utf"):
            return above
        return Group(above, *plot_lines(self.tokens, self.losses, total, width, room))

    def _guard(self, write: Callable[[], None]) -> None:
        if self.broken:
            return
        try:
            write()
        except (Exception, SystemExit):  # a closed file, a pipe (Rich exits), a mistake in the drawing: not worth a run
            self.broken = True
            with suppress(OSError, ValueError):
                # So that whatever else prints, and the last flush of Python, does not fail either.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.console.file.fileno())
                print("abovemup: nothing can be shown any more; the run goes on.", file=sys.stderr, flush=True)


def plot_lines(tokens: "array[float]", losses: "array[float]", total: int, width: int, height: int) -> list[Text]:
    """The mean loss against tokens up to `total`, `height` lines and an axis, with the extremes at the left."""
    bins = 2 * (width - 8)
    column = np.minimum(np.asarray(tokens) * (bins / total), bins - 1).astype(np.int64)
    sums, counts = np.bincount(column, losses, bins), np.bincount(column, minlength=bins)
    columns = [float(s / n) if n else None for s, n in zip(sums, counts, strict=True)]
    known = [y for y in columns if y is not None]
    labels = [f"{max(known):7.3f}"] + [" " * 7] * (height - 2) + [f"{min(known):7.3f}"]
    pairs = zip(labels, braille(columns, height), strict=True)
    axis = " " * 8 + "0" + f"{si(total)} tokens".rjust(width - 9)
    return [*(Text.assemble((a, "dim"), " ", (b, "cyan")) for a, b in pairs), Text(axis, style="dim")]


def closing_lines(summary: Summary) -> list[str]:
    """How the run ended, line by line. Losses and the unigram entropy are in nats per token."""
    head = f"{summary['status']}: {summary.get('steps', 0)} steps, {si(summary.get('tokens', 0))} tokens"
    if speed := summary.get("tokens_per_second"):
        head += f", {si(speed)} tokens/s"
    if reason := summary.get("reason"):
        head += f" ({reason})"
    bits = summary.get("bits_per_byte")
    numbers = [
        ("training loss", summary.get("loss"), "   last batch"),
        ("validation loss", summary.get("val_loss"), "" if bits is None else f"   {bits:.4f} bits per byte"),
        ("unigram entropy", summary.get("unigram_entropy"), "   the loss of knowing token frequencies only"),
        ("entropy rate", summary.get("entropy_rate"), "   the least loss there is: the source is known"),
    ]
    rows = [(name, f"{value:.4f}{after}") for name, value, after in numbers if value is not None]
    if summary.get("dir"):
        folder = shlex.quote(str(summary["dir"]))
        rows.append(("run", folder))
        if summary["status"] in ("interrupted", "failed"):
            rows.append(("go on", f"abovemup train --resume {folder}"))
    if wandb := summary.get("wandb"):
        rows.append(("W&B", wandb))
    lines = [head, *(f"  {name:<17}{text}" for name, text in rows)]
    if sample := summary.get("sample"):
        lines += ["  sample", *(f"    {line}" for line in sample.split("\n"))]
    return lines


def safe(text: str) -> str:
    """Text as it can be shown: control, format and unassigned characters become their escapes, tabs spaces."""
    text = text.expandtabs(4)
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def si(value: float) -> str:
    """1234567 -> "1.23M"; below 1000 as it is."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"
