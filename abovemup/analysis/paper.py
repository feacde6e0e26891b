"""The conditions of arXiv:2510.03871 and its rules, refitted from the points of its figures (tests/golden does it)."""

from abovemup.analysis.rules import read
from abovemup.config.conf import conf_dir
from abovemup.config.io import read_yaml

FIT = read_yaml(conf_dir() / "paper.yaml")
INTERCEPT = 11.765  # of every fixed-intercept fit of the paper: the loss at initialisation
SEQUENCE = 4096  # tokens of a sequence; the paper's batch sizes are in sequences
CONDITIONS, OPTIMA, BAND = FIT["conditions"], FIT["optima"], FIT["band"]
LR, BATCH, NORM = (read(FIT["rules"][of]) for of in ("lr", "batch", "norm"))
