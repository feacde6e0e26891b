"""Reading a study for a fit, at first and from the cache, against `json.loads` over its files; the memory of a fit."""

import json
import sys
import tempfile
import time
from pathlib import Path

from abovemup.bench.ratio import Ratio, beneath
from abovemup.config import io
from abovemup.config.compose import compose

STEPS, EVERY, NORMS, LRS, WHOLE = 1000, 10, 60, 8, 2000
# A process that says its CPU seconds (the files are in the system's cache), and its peak MB before and after.
FIT = """
import resource, sys, time, pyarrow.json
from pathlib import Path
from abovemup.analysis import results, sources
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
before, began = peak(), time.process_time()
source = sources.open_source(Path(sys.argv[1]))
took = time.process_time() - began
assert results.norm(source)["optima"][0]["a"] > 0
print(took, before, peak())
"""


def fits(runs: int = 320) -> list[Ratio]:
    """Of a study of `runs`, that stand for WHOLE: time and memory are per run."""
    with tempfile.TemporaryDirectory() as temporary:
        files = write(study := Path(temporary) / "study", runs)
        began = time.process_time()
        for path in files:
            [json.loads(line) for line in path.open()]
        peer = time.process_time() - began
        (first, before, after), (again, *_) = (fit(study, Path(temporary)) for _ in range(2))
    name, peak = f"reading {runs} runs of {STEPS:,} steps", before + (after - before) * WHOLE / runs
    return [
        Ratio(f"{name} for fit norm, over json.loads", first, peer, "CPU s", 0.6),
        Ratio(f"{name} again, over the first time", again, first, "CPU s", 0.6),
        Ratio(f"peak memory of fit norm, drawn out to {WHOLE:,} runs, over 1.5 GB", peak, 1500, "MB", 1),
    ]


def write(study: Path, runs: int) -> list[Path]:
    """Runs of LRS learning rates and many seeds, whose losses are a parabola over log2 of the norm."""
    layers, files = [f"norm/layers.{i}.attention.wq/rms_to_rms" for i in range(NORMS - 1)], []
    configs = [compose([f"optimizer.lr=2^-{1 + i}", f"train.steps={STEPS}"]) for i in range(LRS)]
    batch = configs[0].train.batch_size * configs[0].train.seq_len
    for i in range(runs):
        folder, x = study / "runs" / str(i), 7 - i % LRS
        folder.mkdir(parents=True)
        io.save(configs[i % LRS], folder / "config.yaml")
        (folder / "summary.json").write_text(json.dumps({"status": "finished", "steps": STEPS}))
        files.append(folder / "metrics.jsonl")
        with files[-1].open("w") as file:
            for t in range(1, STEPS + 1):
                row = {"step": t, "tokens": t * batch, "loss": 3 + 0.1 * (x - 3.4) ** 2 + i / runs / 100 + 1 / t}
                row |= {"lr/hidden": 0.1 / 3, "tokens_per_second": 1e5 / 3, "grad_norm": 1 / 3}
                if t % EVERY == 0:
                    row |= dict.fromkeys(layers, 1 + t / 3) | {"norm/head/rms_to_inf": 2.0**x * t / STEPS}
                file.write(json.dumps(row) + "\n")
    return files


def fit(study: Path, cache: Path) -> list[float]:
    """What FIT says, in a process of its own."""
    said = beneath([sys.executable, "-c", FIT, str(study)], {"ABOVEMUP_CACHE": str(cache)})
    return [*map(float, said.split())]
