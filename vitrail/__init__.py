"""Vitrail: a PyTorch implementation of the Vision Transformer paper, from data to served models."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name → where it lives. Imported on first use, so that `vitrail --help` does not wait for
# torch.
PUBLIC = {
    "Classifier": "vitrail.model",
    "VitrailError": "vitrail.errors",
    "benchmark": "vitrail.benchmarking.benchmark",
    "convert": "vitrail.weights.convert",
    "create": "vitrail.model",
    "evaluate": "vitrail.evaluation.evaluate",
    "export": "vitrail.exporting.export",
    "fewshot": "vitrail.evaluation.fewshot",
    "inspect": "vitrail.inspection.inspect_model",
    "load": "vitrail.weights.load",
    "paper": "vitrail.reproduction.paper",
    "predict": "vitrail.evaluation.predict",
    "report": "vitrail.reporting.page",
    "save": "vitrail.weights.load",
    "serve": "vitrail.serving.server",
    "sweep": "vitrail.training.sweep",
    "train": "vitrail.training.train",
}

__all__ = [*PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'vitrail' has no attribute '{name}'")
    return getattr(import_module(PUBLIC[name]), name)
