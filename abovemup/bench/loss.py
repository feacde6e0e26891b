"""The peak memory of the loss and its gradients, in chunks and at once."""

import sys

from abovemup.bench.ratio import Ratio, beneath

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
    """In processes of their own."""
    chunked, whole = (peak(size) for size in (2**7, 2**12))
    return Ratio("peak memory of the loss, 128 of 4,096 positions at a time over all", chunked, whole, "MB", 0.3)


def peak(positions: int) -> float:
    command = [sys.executable, "-c", LOSS, str(positions)]
    said = beneath(command, {"MALLOC_MMAP_THRESHOLD_": "1000000"})  # else the heap keeps what is free again
    return int(said) * 1024 / 1e6
