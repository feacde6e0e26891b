"""Where a run computes, and how much memory it takes there."""

import resource
import sys
from dataclasses import replace

import torch

from abovemup.config.errors import RequestError
from abovemup.config.schema import Experiment


def placed(experiment: Experiment) -> Experiment:
    """`experiment` with its device settled: `auto` is a CUDA GPU where there is one, else the CPU.

    Raises RequestError for a device that is not there.
    """
    kind = experiment.train.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        built = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no GPU"
        raise RequestError(f"train.device=cuda: {built} (torch {torch.__version__}). Use train.device=cpu.")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise RequestError("train.device=mps: there is no Apple GPU here. Use train.device=cpu.")
    return replace(experiment, train=replace(experiment.train, device=kind))


def memory(where: torch.device) -> int:
    """Peak bytes so far: allocated on the GPU, resident on a CPU."""
    if where.type == "cuda":
        return torch.cuda.max_memory_allocated(where)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
