import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from abovemup.tracking.terminal import Terminal, closing_lines, safe, si

SCRIPT = """
import sys
from rich.console import Console
from abovemup.tracking import terminal
terminal.REFRESH = 0
view = terminal.Terminal(Console(), "run [/bold] tiny width=64 depth=2", steps=STEPS, tokens_per_step=2048)
view.note("data: [lr] ready in /some/very/long/path/" + "x" * 100)
for t in range(STEPS + 1):
    row = {"step": t, "tokens": 2048 * t, "lr/hidden": 0.0625, "norm/head/rms_to_inf": 1.25 + t}
    if t:
        row |= {"loss": 7 / (1 + t), "tokens_per_second": 17000.0}
    if t % 200 == 0:
        row |= {"val/loss": 7.5 / (1 + t), "val/bits_per_byte": 3.25}
    view.log(row)
    if t == STEPS // 2:
        view.note("halfway [red]there[/red]")
MIDDLE
view.close(dict(status="finished", loss=1.5, val_loss=1.75, bits_per_byte=0.875, unigram_entropy=5.125,
    tokens=2048 * STEPS, steps=STEPS, dir="runs/a b", wandb="offline", tokens_per_second=17000.0,
    sample="def f():\\n\\treturn '[/red]' \\x1b[31m \\u202e"))
"""
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def command(steps: int = 1000, middle: str = "") -> list[str]:
    return [sys.executable, "-c", SCRIPT.replace("STEPS", str(steps)).replace("MIDDLE", middle)]


def environment(**changes: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "LINES")}
    root = str(Path(__file__).parents[2])
    return env | {"TERM": "xterm-256color", "PYTHONPATH": root, "PYTHONUTF8": "1"} | changes


def on_a_terminal(columns: int, lines: int, *, middle: str = "", **env: str) -> str:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = subprocess.Popen(
        command(60, middle), stdin=slave, stdout=slave, stderr=slave, env=environment(**env), close_fds=True
    )
    os.close(slave)
    out = b""
    try:
        while chunk := os.read(master, 65536):
            out += chunk
    except OSError:  # Linux: the other end is closed
        pass
    os.close(master)
    assert process.wait() == 0, out.decode()
    return out.decode()


def in_a_pipe(steps: int = 1000, **env: str) -> str:
    done = subprocess.run(command(steps), capture_output=True, env=environment(**env))
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode()


def assert_ending(text: str) -> None:
    for part in ("1.5000", "1.7500", "0.8750 bits per byte", "5.1250", "'runs/a b'", "W&B", "offline"):
        assert part in text
    assert "    def f():\n        return '[/red]' \\x1b[31m \\u202e" in text


def screen(out: str, columns: int, lines: int) -> list[str]:
    """What an endless screen of this width shows in the end; a cursor cannot go back by more than `lines` - 1."""
    rows, y, x = [""], 0, 0
    for escape, char in re.findall(r"\x1b\[([0-9;?]*[a-zA-Z])|(.)", out, re.DOTALL):
        if escape.endswith("A"):
            y -= int(escape[:-1] or 1)
            assert y >= max(len(rows) - lines, 0)
        elif escape == "2K":
            rows[y] = ""
        elif char == "\r":
            x = 0
        elif char:
            if char == "\n" or x == columns:
                x, y = (x if char == "\n" else 0), y + 1
                rows += [""] * (y + 1 - len(rows))
            if char != "\n":
                rows[y] = rows[y][:x].ljust(x) + char + rows[y][x + 1 :]
                x += 1
    return rows


@pytest.mark.parametrize(("columns", "lines"), [(20, 12), (40, 24), (62, 24), (100, 30), (250, 12)])
def test_the_live_view_leaves_one_frame_and_all_notes(columns: int, lines: int) -> None:
    out = on_a_terminal(columns, lines)
    assert out.count("\x1b[2K") > 60
    shown = screen(out, columns, lines)
    text = "\n".join(shown)
    wrapped = "".join(row.ljust(columns) for row in shown)
    assert wrapped.startswith("data: [lr] ready in /some/very/long/path/" + "x" * 100)
    assert text.count("halfway") == 1
    title = "run [/bold] tiny width=64 depth=2"[:columns]
    assert [row.rstrip() for row in shown].count(title.rstrip()) == 1
    above, frame = text.split(title)
    assert "halfway [red]there[/red]" in above.replace("\n", "")
    for part in ("step 60/60", "tokens 123k/123k", "loss 0.1148", "val loss 7.5", "lr 0.0625", "output norm 61.25"):
        assert part in frame
    assert bool(re.search("[\u2801-\u28ff]", frame)) == (columns >= 40)
    if columns >= 100:
        assert_ending(frame)


def test_the_cursor_is_never_hidden_for_long() -> None:
    out = on_a_terminal(80, 24, middle="import os; os._exit(0)")
    assert out.rindex("\x1b[?25h") > out.rfind("\x1b[?25l")


def test_no_color_keeps_the_view_without_colours() -> None:
    out = on_a_terminal(80, 24, NO_COLOR="1")
    assert "\x1b[2K" in out
    colours = [code for codes in re.findall(r"\x1b\[([0-9;]*)m", out) for code in codes.split(";")]
    assert not [code for code in colours if code and int(code) >= 30]


def test_a_dumb_terminal_gets_plain_lines() -> None:
    out = on_a_terminal(40, 24, TERM="dumb")
    assert "\x1b" not in out
    assert_ending(out.replace("\r", ""))
    assert "step 60/60  tokens 123k  loss 0.1148" in out


def test_a_resize_is_taken_up_by_the_next_frame() -> None:
    resize = "import fcntl,termios,struct; fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack('HHHH', 20, 30, 0, 0)); "
    out = on_a_terminal(100, 30, middle="print('resized'); " + resize + "view.log(row)")
    after = out[: out.rindex("finished: 60")].split("resized")[-1].split("run [/bold] tiny width=64")[-1]
    assert max(len(line) for line in ESCAPE.sub("", after).replace("\r", "").split("\n")) <= 30


@pytest.mark.parametrize("env", [{}, {"FORCE_COLOR": "1", "COLUMNS": "40"}, {"TERM": "dumb", "COLUMNS": "40"}])
def test_a_pipe_gets_whole_plain_lines(env: dict[str, str]) -> None:
    out = in_a_pipe(**env)
    assert "\x1b" not in out
    assert "…" not in out
    assert_ending(out)
    assert "data: [lr] ready in /some/very/long/path/" + "x" * 100 + "\n" in out
    rows = [line for line in out.split("\n") if line.startswith("step ")]
    assert 20 <= len(rows) <= 45
    assert rows[0].startswith("step 0/1000  tokens 0  val loss 7.5000  bits/byte 3.2500  lr 0.0625  output norm 1.25")
    assert rows[-1].startswith("step 1000/1000  tokens 2.05M  loss 0.0070  val loss 0.0075")
    assert sum("val loss" in row for row in rows) == 6


def test_short_runs_show_every_step() -> None:
    rows = [line for line in in_a_pipe(6).split("\n") if line.startswith("step ")]
    assert [row.split()[1] for row in rows] == [f"{t}/6" for t in range(7)]


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    proof = tmp_path / "ran to its end"
    middle = f"print('somebody else prints', flush=True); open({str(proof)!r}, 'w').close()"
    process = subprocess.Popen(
        command(20_000, middle), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read().decode()
    assert process.wait() == 0
    assert proof.exists()
    assert error == "abovemup: nothing can be shown any more; the run goes on.\n"


def test_a_console_that_cannot_say_it_gets_escapes() -> None:
    """With the error handler that the command line gives stdout, and that stderr has."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("STEPS", "3").replace("MIDDLE", "view.note('na\\xefve \\u221e')")],
        capture_output=True,
        env=environment(PYTHONUTF8="0", PYTHONIOENCODING="ascii:backslashreplace", PYTHONCOERCECLOCALE="0", LC_ALL="C"),
    )
    assert done.returncode == 0
    assert b"na\\xefve \\u221e\n" in done.stdout


def test_a_missing_or_non_finite_value_is_no_trouble() -> None:
    screen = io.StringIO()
    view = Terminal(Console(file=screen), "x", steps=1, tokens_per_step=8)
    view.log({"step": 1, "tokens": 8, "loss": float("nan"), "tokens_per_second": 0.0})
    view.close({"status": "diverged", "reason": "step 1: loss nan, gradient norm inf"})
    assert screen.getvalue().split("\n") == [
        "step 1/1  tokens 8  loss nan",
        "diverged: 0 steps, 0 tokens (step 1: loss nan, gradient norm inf)",
        "",
    ]


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_an_unfinished_run_says_how_to_go_on(status: str) -> None:
    lines = closing_lines({"status": status, "dir": "runs/x"})
    assert any(line.endswith("abovemup train --resume runs/x") for line in lines)


def test_safe_text() -> None:
    assert safe("a\tb\n\x1b]0;title\x07\r\x00\u200b\u2028é漢") == ("a   b\n\\x1b]0;title\\x07\\r\\x00\\u200b\\u2028é漢")


def test_numbers() -> None:
    assert [si(x) for x in (0, 999, 999.9, 1000, 123456, 2048000, 1e9)] == [
        "0", "999", "1k", "1k", "123k", "2.05M", "1B",
    ]  # fmt: skip


def test_signals_are_not_touched() -> None:
    before = signal.getsignal(signal.SIGWINCH), signal.getsignal(signal.SIGINT)
    Terminal(Console(file=io.StringIO()), "x", steps=1, tokens_per_step=1).close({"status": "finished"})
    assert (signal.getsignal(signal.SIGWINCH), signal.getsignal(signal.SIGINT)) == before
