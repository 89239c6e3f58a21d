"""The part of a run's page about the experts of a mixture: how even their load is, over time and layer by layer."""

from typing import Any

from bloomery.monitor.events import ExpertLoad
from bloomery.report.charts import HeatMap, Series, heat_map, line_chart
from bloomery.report.record import RunRecord
from bloomery.report.rewards import ROUTER_GROUPS, group_charts

OF_ROUTERS = "router/"  # how the names of their metrics begin
# Lines over time: of all experts of all layers, the load below which this share of them is.
SHARES = {"highest": 1.0, "upper tenth": 0.9, "median": 0.5, "lower tenth": 0.1, "lowest": 0.0}


def load_map(event: ExpertLoad, title: str = "Load of each expert") -> HeatMap:
    """Layers by experts."""
    return HeatMap(
        title,
        [(f"layer {layer}", ratios) for layer, ratios in event.rows()],
        across="expert",
        up="layer",
    )


def expert_charts(record: RunRecord) -> dict[str, Any] | None:
    """None for a model without experts."""
    loads = [event for event in record.expert_loads if event.rows()]
    if not loads:
        return None
    lines = []
    for number, (name, share) in enumerate(SHARES.items()):
        points = []
        for event in loads:
            values = sorted(ratio for _, ratios in event.rows() for ratio in ratios)
            points.append((event.step, values[round(share * (len(values) - 1))]))
        lines.append(Series(name, points, f"d{number}"))
    over_time = line_chart(
        "Load over time", lines, unit="of all experts, relative to an even load", from_zero=True
    )
    return {
        "step": f"{loads[-1].step:,}",
        "map": heat_map(load_map(loads[-1])),
        "charts": [over_time, *group_charts(record, ROUTER_GROUPS)],
    }
