"""One thread, one cache for the session, nothing of the user's machine."""

import os
import tempfile
from pathlib import Path

import pytest

# Before torch is imported anywhere, and inherited by the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ.pop("WANDB_API_KEY", None)


def pytest_configure(config: pytest.Config) -> None:
    """All workers of one pytest run share the prepared data; no run shares it with the user."""
    if "ABOVEMUP_CACHE" not in os.environ or not hasattr(config, "workerinput"):
        os.environ["ABOVEMUP_CACHE"] = tempfile.mkdtemp(prefix="abovemup-cache-")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
