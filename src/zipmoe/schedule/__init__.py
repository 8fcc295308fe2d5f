"""Typed face of the native scheduler (docs/scheduling.md): residency of experts, expected time of a layer."""

from zipmoe.schedule.layer_model import LayerModel, Order, TensorCosts
from zipmoe.schedule.residency import Residency

__all__ = ["LayerModel", "Order", "Residency", "TensorCosts"]
