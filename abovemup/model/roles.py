"""What a parameter *is*: its role and norm, as tags that the modules themselves carry."""

from dataclasses import dataclass

from torch import nn

from abovemup.config.schema import Role
from abovemup.geometry.roles import ROLE_NORM, ParameterSpec


@dataclass(frozen=True)
class Tag:
    role: Role
    init: float  # the role's norm right after exact initialisation
    base: tuple[int, ...]  # the parameter's shape at the base of the parameterization
    forward: float = 1.0  # multiplier of the parameter in the forward pass


class Tagged(nn.Module):
    """A module that owns parameters; `tags` maps each of its attributes to what it is."""

    tags: dict[str, Tag]


def tagged_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter, Tag]]:
    """Every distinct parameter once, as (name, parameter, tag): embedding first, head last, blocks between.

    A tensor shared by embedding and head is an embedding and has the embedding's name, whichever of
    the two was registered first. Raises ValueError for a parameter that no tag covers.
    """
    found: dict[int, tuple[str, nn.Parameter, Tag]] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}" if path else attribute
            tag = module.tags.get(attribute) if isinstance(module, Tagged) else None
            if tag is None:
                raise ValueError(f"parameter {name} has no role: give its module a tag for {attribute}")
            if id(parameter) not in found or tag.role == "embedding":
                found[id(parameter)] = (name, parameter, tag)
    place = {"embedding": 0, "head": 2}
    return sorted(found.values(), key=lambda entry: place.get(entry[2].role, 1))


def specs(model: nn.Module) -> list[ParameterSpec]:
    """One ParameterSpec per distinct tensor, in a fixed order; works on the meta device."""
    return [
        ParameterSpec(name=name, shape=tuple(parameter.shape), norm=ROLE_NORM[tag.role], **vars(tag))
        for name, parameter, tag in tagged_parameters(model)
    ]
