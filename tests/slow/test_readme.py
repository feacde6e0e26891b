"""The README's commands work as they are written.

A fenced block of bash right after `<!-- run -->` is run line by line, in the order of the page, in one empty folder;
after `<!-- run: exits 2 -->` each of its commands must end with that code.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"^<!-- run(?:: exits (\d+))? -->\s*\n+```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT = 360  # seconds of one command


def commands(text: str) -> list[tuple[str, int]]:
    """Each marked command, its continued lines joined, and the exit code that the page promises."""
    found = []
    for code, block in BLOCK.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        found += [(line, int(code or 0)) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return found


def test_what_is_read_from_a_page() -> None:
    page = "\n<!-- run -->\n```bash\n# why\na b  # c\n\nd \\\n  e\n```\n```bash\nnot this\n```\n"
    page += "<!-- run: exits 2 -->\n\n```bash\nf\n```\n"
    assert [(" ".join(line.split()), code) for line, code in commands(page)] == [("a b # c", 0), ("d e", 0), ("f", 2)]


def test_readme(tmp_path: Path) -> None:
    marked = commands(README.read_text(encoding="utf-8"))
    assert marked, f"{README} marks no command to run"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for line, code in marked:
        assert not re.match(r"\s*(make|git|pip)\b", line), f"not a command for a test: {line}"
        result = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=os.environ | {"PATH": path, "WANDB_MODE": "offline"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert result.returncode == code, f"{line}\nexits {result.returncode}\n{result.stdout}{result.stderr}"
        assert "Traceback" not in result.stderr, line
