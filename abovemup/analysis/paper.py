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
NORM = Rule(  # Fig. 1b, within 2 octaves of the band: a norm of the output layer on its way
    of="norm",
    exponents={"lr": 0.42413, "batch": -0.55085, "tokens": 0.41950, "constant": 5.64289},
    covariance=[
        [3.1925e-05, -1.4663e-05, 1.2959e-05, -1.5551e-05],
        [-1.4663e-05, 3.6448e-05, -1.5946e-05, -2.5243e-04],
        [1.2959e-05, -1.5946e-05, 2.5072e-05, -4.6189e-04],
        [-1.5551e-05, -2.5243e-04, -4.6189e-04, 2.0303e-02],
    ],
    r2=0.96912,
    n=351,
    residual=0.19654,
    ranges={"lr": [2.0**-7, 0.5], "batch": [2.0**17, 2.0**23], "tokens": [2.0**26, 2.0**37]},
)
_LOSSES = {  # Fig. 17a, fitted: batch sizes of 32 to 2048 sequences
    31: (4.579, 4.413, 4.399, 4.513, 4.704, 5.048, 5.39),
    33: (4.591, 4.284, 4.149, 4.191, 4.244, 4.290, 4.552),
    35: (4.559, 4.284, 4.124, 4.018, 3.975, 4.025, 4.094),
    37: (4.674, 4.475, 4.189, 3.971, 3.876, 3.855, 3.920),
}
OPTIMA = [
    {"tokens": 2.0**d, "batch": 2.0 ** (17 + i), "loss": loss}
    for d, row in _LOSSES.items()
    for i, loss in enumerate(row)
]
BATCH = Rule(  # Fig. 7b: 9 horizons
    of="batch",
    exponents={"tokens": 0.45, "constant": 5.15},
    covariance=[[0.00440476, -0.145357], [-0.145357, 4.82615]],
    r2=0.86786,
    n=9,
    residual=0.51409,
    ranges={"tokens": [2.0**29, 2.0**37]},
)
