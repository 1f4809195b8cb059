"""Addresses → local files: each arrives whole and checked, or not at all."""

import os
from pathlib import Path

from vitrail.weights.hub import Repository
from vitrail.weights.web import PATIENCE, download, on_disk, place
from vitrail.weights.web import Patience as Patience


def cache() -> Path:
    """Where fetched files are kept: `$VITRAIL_CACHE`, else `~/.cache/vitrail`."""
    return Path(os.environ.get("VITRAIL_CACHE") or "~/.cache/vitrail").expanduser()


def fetch(source: str, folder: Path | None = None, patience: Patience = PATIENCE) -> Path:
    """The file behind `https://…`, or the folder behind `hub:owner/repository[@revision]`.

    What was fetched once is found again without a network. Web files are kept in `cache()`, those
    of the hub in the hub's own cache, which other programs share; `folder` replaces either.
    """
    if source.startswith("hub:"):
        return Repository.parse(source, folder).fetch()
    target = place(source, folder or cache())
    with on_disk(target):
        fetched = target.exists()
    if not fetched:
        download(source, target, patience)
    return target
