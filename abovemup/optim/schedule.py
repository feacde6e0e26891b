"""The learning rate's factor: a pure function of the step, so that nothing about it is ever saved or loaded."""

from math import cos, pi

from abovemup.config.schema import Schedule


def factor(step: int, schedule: Schedule, steps: int) -> float:
    """What the peak learning rate is multiplied by at optimizer step `step` = 1..steps: finite and in [0, 1].

    Warmup rises linearly and reaches 1 at step `warmup`. `wsd` falls linearly over the last `decay` steps, `cosine`
    over all steps after the warmup: the first of them is still at the peak, and `final` is reached after the last
    one, so that no step is spent at a rate of zero. Beyond the end the factor stays what it has become. Where warmup
    and decay overlap, the lower counts.
    """
    rise = min(1.0, step / schedule.warmup) if schedule.warmup > 0 else 1.0
    high = _remaining(step, schedule, steps)
    return min(rise, high + (1 - high) * schedule.final)


def _remaining(step: int, schedule: Schedule, steps: int) -> float:
    """How much of the way from `final` up to the peak is left: 1 before a decay, 0 after it."""
    if schedule.name == "wsd" and schedule.decay > 0:
        return 1 - _fraction(step - 1 - (steps - schedule.decay), schedule.decay)
    if schedule.name == "cosine":
        return (1 + cos(pi * _fraction(step - 1 - schedule.warmup, steps - schedule.warmup))) / 2
    return 1.0


def _fraction(done: int, length: int) -> float:
    """done / length within [0, 1]; a length of nothing is over as soon as it begins."""
    return min(1.0, max(0.0, done / length)) if length > 0 else float(done >= 0)
