"""Weights on the web and on the Hugging Face Hub: downloaded once and verified."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import FailureError, VitrailError
from vitrail.files import (
    RETRIES,
    RetryPolicy,
    damage_error,
    failure_reason,
    fetch_file,
    hash_mismatch,
    host_of,
)
from vitrail.weights.read import WEIGHTS


def fetch(source: str, folder: Path | None = None, retries: RetryPolicy = RETRIES) -> Path:
    """The file behind `https://…`, or the folder behind `hub:owner/repository[@revision]`.

    `package:folder` is a folder that was installed with Vitrail: there is nothing to fetch.

    What was downloaded once needs no network again. Web files are stored in `cache_folder()`, those
    of the hub in the hub's own cache, which other programs share; `folder` replaces either.
    """
    if source.startswith("package:"):
        return Path(__file__).parents[1] / source.removeprefix("package:")
    if not source.startswith("hub:"):
        return fetch_file(source, folder, retries)
    parts = re.fullmatch(r"hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", source)
    if not parts:
        raise VitrailError(
            f"cannot fetch '{source}'; expected hub:owner/repository or "
            "hub:owner/repository@revision"
        )
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise VitrailError(f"{source} needs the hub extra: pip install 'vitrail[hub]'") from error
    repository = _Repository(parts[1], parts[2] or "main", folder)
    return repository.cached() or repository.download()


@dataclass(frozen=True)
class _Repository:
    """One revision of a hub repository. A branch, once fetched, is not checked for updates."""

    name: str
    revision: str
    cache: Path | None

    @property
    def endpoint(self) -> str:
        return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")

    def cached(self) -> Path | None:
        """The folder, if it was fetched before."""
        from huggingface_hub import try_to_load_from_cache

        def saved(file: str) -> str | None:
            path = try_to_load_from_cache(
                self.name, file, cache_dir=self.cache, revision=self.revision
            )
            return path if isinstance(path, str) else None

        config = saved("config.json")
        return Path(config).parent if config and any(map(saved, WEIGHTS)) else None

    def download(self) -> Path:
        """The folder. The config comes last, so that its presence means a verified folder."""
        weights = next(filter(None, map(self._file, WEIGHTS)), None)
        self._file("preprocessor_config.json")
        config = self._file("config.json")
        if not weights or not config:
            missing = "config.json" if weights else " or ".join(WEIGHTS)
            raise VitrailError(
                f"{self.name} on {host_of(self.endpoint)} has no {missing}; choose a repository "
                "that holds a model"
            )
        if weights.parent != config.parent:
            raise FailureError(f"{self.name} changed while it was being fetched; run again")
        return config.parent

    def _file(self, name: str) -> Path | None:
        """One verified file, or None where the repository has none of that name."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import RemoteEntryNotFoundError

        where = {"revision": self.revision, "endpoint": self.endpoint}
        try:
            # Also the quickest way to notice being offline: the download itself keeps trying.
            about = get_hf_file_metadata(hf_hub_url(self.name, name, **where))
            path = Path(hf_hub_download(self.name, name, cache_dir=self.cache, **where))
        except RemoteEntryNotFoundError:
            return None
        except Exception as error:  # its transport's errors, and its transport, vary by version
            raise self._error(name, error) from error
        # Small files have a git hash here, which is not that of their bytes alone.
        sha256 = re.fullmatch(r"[0-9a-f]{64}", about.etag or "")
        if sha256 and (damage := hash_mismatch(path, {"sha256": sha256[0]})):
            path.resolve().unlink()  # the bytes; `path` is a link to them
            path.unlink(missing_ok=True)
            raise damage_error(name, self.name, damage)
        return path

    def _error(self, file: str, error: Exception) -> VitrailError:
        from huggingface_hub import errors

        host = host_of(self.endpoint)
        if isinstance(error, errors.GatedRepoError):
            return VitrailError(
                f"{self.name} on {host} is gated; accept its terms there, then run 'hf auth login'"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return VitrailError(
                f"{host} has no repository {self.name}, or keeps it private; check the name, or "
                "run 'hf auth login'"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return VitrailError(
                f"{self.name} on {host} has no revision '{self.revision}'; check its branches"
            )
        return FailureError(
            f"cannot fetch {file} of {self.name} from {host} ({failure_reason(error)}), and it is "
            "not in the hub's cache; go online, or download the repository and give its path"
        )
