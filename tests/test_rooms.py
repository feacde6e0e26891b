"""The arrows between the rooms (DESIGN.md section 2) stay true, and starting up stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

OVER = 2_122
PACKAGE = Path(__file__).parents[1] / "abovemup"
MAY_IMPORT = {
    "geometry": set(),
    "config": set(),
    "model": {"geometry", "config"},
    "optim": {"geometry", "config"},
    "data": {"geometry", "config"},
    "tracking": {"geometry", "config"},
    "training": {"model", "optim", "data", "tracking", "geometry", "config"},
    "analysis": {"config"},
    "bench": {"training", "model", "optim", "data", "tracking", "geometry", "config"},
    "studies": {"analysis", "training", "model", "optim", "data", "tracking", "geometry", "config"},
    "cli": {"studies", "analysis", "bench", "training", "model", "optim", "data", "tracking", "geometry", "config"},
}


def imports(path: Path) -> set[str]:
    """Rooms of ours that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {parts[1] for name in names if (parts := name.split("."))[0] == "abovemup" and len(parts) > 1}


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_arrows(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        known = {found for found in imports(path) if (PACKAGE / found).is_dir()}
        assert known - {room} <= MAY_IMPORT[room], path


def test_every_room_is_judged() -> None:
    rooms = {p.name for p in PACKAGE.iterdir() if p.is_dir() and list(p.glob("*.py"))} - {"conf"}
    assert rooms == set(MAY_IMPORT)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['abovemup', '--help']\n"
        "from abovemup.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'wandb', 'datasets', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_package_stays_small() -> None:
    """Lines of code: without blank lines, comments and docstrings, which nobody should save on.

    The package is meant to stay under 9,000 and does not: with studies, reports and several processes it is OVER by as
    much. CHANGELOG says so; the number may only fall.
    """
    count = 0
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        said: set[int] = set()
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                said |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = enumerate(map(str.strip, text.splitlines()), start=1)
        count += sum(1 for number, line in lines if line and not line.startswith("#") and number not in said)
    assert 5_000 < count < 9_000 + OVER
