"""The conditions of arXiv:2510.03871 and its rules, refitted from the points of its figures (tests/golden does it)."""

from abovemup.analysis.rules import Rule

INTERCEPT = 11.765  # of every fixed-intercept fit of the paper: the loss at initialisation
SEQUENCE = 4096  # tokens of a sequence; the paper's batch sizes are in sequences
BAND = {"log2_norm": 7.014, "half_width": 0.163, "groups": 4}  # Fig. 2a
CONDITIONS = {
    "optimizer.name": "scion",
    "optimizer.momentum": 0.0,
    "optimizer.weight_decay": 0.0,
    "schedule.name": "constant",
    "schedule.warmup": 0,
    "parameterization.name": "above_mup",
    "parameterization.base_width": 256,
    "model.norm_placement": "everywhere",
    "model.vocab_size": 128256,
    "train.seq_len": SEQUENCE,
    "data.name": "nemotron_cc",
}
LR = Rule(  # Fig. 3b: 7 batch sizes x 4 horizons, means over the six variants
    of="lr",
    exponents={"batch": 0.61922, "tokens": -0.55776, "constant": 2.32092},
    covariance=[[0.00257217, 0.0, -0.0514434], [0.0, 0.00205773, -0.0699630], [-0.0514434, -0.0699630, 3.41790]],
    r2=0.92314,
    n=28,
    residual=0.53673,
    ranges={"batch": [2.0**17, 2.0**23], "tokens": [2.0**31, 2.0**37]},
)
BATCH = Rule(  # Fig. 7b: 9 horizons
    of="batch",
    exponents={"tokens": 0.45, "constant": 5.15},
    covariance=[[0.00440476, -0.145357], [-0.145357, 4.82615]],
    r2=0.86786,
    n=9,
    residual=0.51409,
    ranges={"tokens": [2.0**29, 2.0**37]},
)
