"""Addresses of weights → local files or folders: each arrives whole and checked, or not at all."""

from pathlib import Path

from vitrail.files import PATIENCE, Patience, fetch_file
from vitrail.weights.hub import Repository


def fetch(source: str, folder: Path | None = None, patience: Patience = PATIENCE) -> Path:
    """The file behind `https://…`, or the folder behind `hub:owner/repository[@revision]`.

    `package:folder` is a folder that was installed with Vitrail: there is nothing to fetch.

    What was fetched once is found again without a network. Web files are kept in `cache()`, those
    of the hub in the hub's own cache, which other programs share; `folder` replaces either.
    """
    if source.startswith("package:"):
        return Path(__file__).parents[1] / source.removeprefix("package:")
    if source.startswith("hub:"):
        return Repository.parse(source, folder).fetch()
    return fetch_file(source, folder, patience)
