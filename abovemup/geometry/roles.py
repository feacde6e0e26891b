"""The roles that a parameter can have, and the one norm of each: everything else follows from it. Free of torch."""

ROLE_NORM = {
    "embedding": "one_to_rms",
    "hidden": "rms_to_rms",
    "head": "rms_to_inf",
    "gain": "max_abs",
    "bias": "rms",
}
