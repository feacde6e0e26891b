"""The routing table: for every parameter its role, norm, multipliers and optimizer, decided once per tensor."""

from collections.abc import Iterable
from dataclasses import dataclass

from abovemup.config.errors import RequestError
from abovemup.config.keys import did_you_mean
from abovemup.config.schema import Experiment, NormControl
from abovemup.geometry.norms import NORMS
from abovemup.geometry.parameterization import ADAM, eps_multiplier, lr_multiplier, residual_multipliers
from abovemup.geometry.roles import ParameterSpec


@dataclass(frozen=True, kw_only=True)
class Route(ParameterSpec):
    """One row of the table that `abovemup show` prints."""

    rule: str  # how it steps: a name in geometry.NORMS, or "adam"
    scale: float  # the step has norm lr * scale in `rule`
    lr_mult: float  # lr of the group over optimizer.lr: the parameterization's factor times optimizer.lr_scale
    weight_decay: float  # as the optimizer gets it: over lr_mult, so that lr * weight_decay has no multiplier
    norm_control: NormControl = "decay"  # what weight_decay does
    momentum: float
    eps: float  # Adam's with the parameterization's factor
    optimizer: str  # steepest_descent, adam, adamw, or the user's optimizer.target


def routing_table(specs: Iterable[ParameterSpec], experiment: Experiment) -> list[Route]:
    """One Route per spec, in their order.

    Raises RequestError for a rule that does not exist, a rule for matrices on a vector, options of msign that
    exclude each other, and a norm control without a weight decay, with one too large, or on a user's own optimizer.
    """
    msign = experiment.optimizer.msign
    if msign.method == "exact" and msign.dtype == "bfloat16":
        raise RequestError("optimizer.msign.method=exact is an SVD: set optimizer.msign.dtype=float32 or float64.")
    return [_route(spec, experiment) for spec in specs]


def _route(spec: ParameterSpec, experiment: Experiment) -> Route:
    optimizer = experiment.optimizer
    row = getattr(optimizer.roles, spec.role)
    adam = row.norm == ADAM
    if not adam:
        _check_rule(spec, row.norm)
    parameterization = experiment.parameterization.name
    try:
        lr_mult = lr_multiplier(parameterization, spec.role, row.norm, spec.shape, spec.base)
    except ValueError as error:
        instead = "use parameterization=above_mup"
        raise RequestError(f"optimizer.roles.{spec.role}.norm={row.norm}: {error}: {instead}.") from error
    # Adam has no scale of its own: a factor on its step is a factor on its lr.
    lr_mult *= getattr(optimizer.lr_scale, spec.role) * (row.scale if adam else 1)
    weight_decay = optimizer.weight_decay if row.weight_decay is None else row.weight_decay
    control = _norm_control(spec, experiment, weight_decay)
    own = ("adamw" if weight_decay and control == "decay" else "adam") if adam else "steepest_descent"
    return Route(
        **vars(spec),
        rule=row.norm,
        scale=1.0 if adam else row.scale,
        lr_mult=lr_mult,
        weight_decay=weight_decay / lr_mult if lr_mult else 0.0,
        norm_control=control,
        momentum=optimizer.momentum if row.momentum is None else row.momentum,
        eps=optimizer.eps * (_adam_eps(spec, experiment) if adam else 1),
        optimizer=optimizer.target or own,
    )


def _norm_control(spec: ParameterSpec, experiment: Experiment, decay: float) -> NormControl:
    """The role's, or the optimizer's unless the role is exempt from decay."""
    optimizer = experiment.optimizer
    row = getattr(optimizer.roles, spec.role)
    control: NormControl = optimizer.norm_control if row.norm_control is None else row.norm_control
    if control == "decay":
        return control
    where = "optimizer." if row.norm_control is None else f"optimizer.roles.{spec.role}."
    if optimizer.target is not None:
        raise RequestError(f"{where}norm_control={control} does not reach optimizer.target: drop one of them.")
    if row.weight_decay == 0 and row.norm_control is None:
        return "decay"
    if decay == 0:
        raise RequestError(f"{where}norm_control={control} is as strong as {where}weight_decay, which is 0: set it.")
    if control.startswith("pre_decay") and optimizer.lr * decay > 1:
        raise RequestError(
            f"{where}norm_control={control} needs optimizer.lr * weight_decay <= 1, not {optimizer.lr * decay:g}: "
            "from there on a single step is longer than its bound. Lower one of the two."
        )
    return control


def _adam_eps(spec: ParameterSpec, experiment: Experiment) -> float:
    """CompleteP's table 1 (arXiv:2505.01618): a gradient inside a block also carries the block's multiplier."""
    p, m = experiment.parameterization, experiment.model
    factor = eps_multiplier(p.name, spec.role, spec.shape, spec.base)
    if not spec.name.startswith("layers."):
        return factor
    here, base = (residual_multipliers(m.residual, depth, p.base_depth)[1] for depth in (m.depth, p.base_depth))
    return factor * (here / base)


def _check_rule(spec: ParameterSpec, name: str) -> None:
    key = f"optimizer.roles.{spec.role}.norm={name}"
    if name not in NORMS:
        hint = did_you_mean(name, [ADAM, *NORMS]) or f" Choices: {', '.join([ADAM, *NORMS])}."
        raise RequestError(f"{key} does not exist.{hint}")
    if NORMS[name].ndim > len(spec.shape):
        vectors = [n for n, ball in NORMS.items() if ball.ndim == 1]
        raise RequestError(f"{key} is a norm of matrices and {spec.name} is a vector: {', '.join(vectors)} or {ADAM}.")
