"""`abovemup doctor`: what this machine has, and what is missing."""

import importlib.util
import os
import shutil
from pathlib import Path

from abovemup.cli.options import Json


def doctor(json: Json = False) -> None:
    """Versions, devices, bf16, compile, threads, cache, and whether W&B and the hub know you (never a key)."""
    from huggingface_hub import get_token

    from abovemup.cli.output import print_json, print_table
    from abovemup.config.conf import conf_dir
    from abovemup.tracking.summary import environment
    from abovemup.tracking.wandb import logged_in

    versions = environment()["versions"]
    versions["abovemup"] = f"{versions['abovemup']} (choices in {conf_dir()})"
    found = {name: version or "not installed" for name, version in versions.items()}
    found |= _devices() | {"cache": _cache()}
    online, offline = "logged in: runs go online", "not logged in (wandb login): runs are logged offline"
    found["W&B"] = online if logged_in() else offline
    found["hub"] = "logged in" if get_token() else "not logged in (hf auth login)"
    print_json(found) if json else print_table(["", ""], found.items())


def _devices() -> dict[str, str]:
    import torch

    from abovemup.config.resolve import cores

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = [f"cuda:{i} ({gpu.name}, {gpu.total_memory / 2**30:.0f} GiB)" for i, gpu in enumerate(gpus)]
    names += ["mps"] if torch.backends.mps.is_available() else []
    found = {"devices": ", ".join([f"cpu ({cores()} cores)", *names])}
    nvidia = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi")
    if torch.version.cuda is None and torch.version.hip is None and nvidia:
        found["problem"] = "this machine has an NVIDIA GPU, but torch is a CPU build: install torch with CUDA."
    cpu = torch.cpu.get_capabilities()
    in_hardware = torch.cuda.is_bf16_supported(False) if gpus else cpu.get("avx512_bf16") or cpu.get("amx_bf16")
    found["bf16"] = f"{'in hardware' if in_hardware else 'emulated: slow'} on the {'GPU' if gpus else 'CPU'}"
    triton = "triton" if importlib.util.find_spec("triton") else None
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    found["compile"] = (triton if gpus else compiler) or "no triton or C++ compiler: train.compile=true will fail"
    threads = f"torch would use {torch.get_num_threads()}; a run uses train.threads (1 below width 256)"
    found["threads"] = f"{threads}; OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}"
    return found


def _cache() -> str:
    from rich.filesize import decimal

    from abovemup.config.site import cache_folder

    folder = cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    state = "" if folder.exists() else ", made at first use"
    writable = "" if os.access(there, os.W_OK) else ", NOT WRITABLE: set ABOVEMUP_CACHE"
    return f"{folder} ({decimal(shutil.disk_usage(there).free)} free{state}{writable})"
