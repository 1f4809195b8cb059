"""The options of `vitrail export`, each with the format it is for."""

from pathlib import Path
from typing import Any

from vitrail.errors import VitrailError
from vitrail.exporting.export import Parity
from vitrail.exporting.export import export as export_graph
from vitrail.exporting.hub import export_hub
from vitrail.weights.convert import Parity as Conversion

FOR_GRAPHS = {"int8": False, "data": "", "dynamic_size": False, "preprocessing": "inside"}


def export(
    model: str | Path, target: str | Path, *, kind: Any, to: Any, upload: str, **graph: Any
) -> Parity | Conversion:
    """A graph in a file, or a folder for the hub."""
    if kind != "hub":
        if to or upload:
            raise VitrailError("--to and --upload are for --format hub")
        return export_graph(model, target, kind=kind, **graph)
    for name, usual in FOR_GRAPHS.items():
        if graph[name] != usual:
            raise VitrailError(f"--{name.replace('_', '-')} is not for --format hub")
    return export_hub(model, target, to=to or "timm", upload=upload)
