"""The peak memory of the loss and its gradients, in chunks and at once."""

import subprocess
import sys

from abovemup.bench.ratio import Ratio

# A head (32768, 64), 4,096 positions; prints the process's peak in KB.
LOSS = """
import resource, sys, torch
from abovemup.model.loss import chunked_loss
torch.set_num_threads(1)
W, x = (torch.randn(n, 64, requires_grad=True) for n in (2**15, 2**12))
chunked_loss(lambda x: x @ W.T, x[None], torch.zeros(1, 2**12, dtype=torch.int64), int(sys.argv[1])).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def loss() -> Ratio:
    """In processes of their own, each below a shell that keeps this one's peak out of it."""
    chunked, whole = (peak(size) for size in (2**7, 2**12))
    return Ratio("peak memory of the loss, 128 of 4,096 positions at a time over all", chunked, whole, "MB", 0.5)


def peak(positions: int) -> float:
    shell = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", LOSS, str(positions)]
    return int(subprocess.run(shell, check=True, capture_output=True, text=True).stdout) * 1024 / 1e6
