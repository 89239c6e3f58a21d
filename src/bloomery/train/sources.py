"""The batch sources of objectives: the prepared dataset, or completions that the model draws."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from bloomery.facts.objectives import BatchOrigin
from bloomery.train.rl.rollouts import rollout_source
from bloomery.train.source import BatchSource, DatasetSource, SourceInputs

SOURCES: Mapping[BatchOrigin, Callable[[SourceInputs], BatchSource]] = MappingProxyType(
    {"dataset": DatasetSource, "rollouts": rollout_source}
)


def source_of(inputs: SourceInputs) -> BatchSource:
    """The source that the plan's objective trains on."""
    return SOURCES[inputs.plan.objective.spec.source](inputs)
