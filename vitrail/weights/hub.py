"""A repository of the Hugging Face hub as a folder, through huggingface_hub."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import FailureError, VitrailError
from vitrail.files import damage_of, damaged, host_of, reason_of
from vitrail.weights.files import WEIGHTS


@dataclass(frozen=True)
class Repository:
    """One revision of a repository. A branch, once fetched, is not asked for again."""

    name: str
    revision: str
    folder: Path | None

    @classmethod
    def parse(cls, source: str, folder: Path | None) -> "Repository":
        """`hub:owner/repository`, or `hub:owner/repository@revision`."""
        parts = re.fullmatch(r"hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", source)
        if not parts:
            raise VitrailError(
                f"cannot fetch '{source}'; expected hub:owner/repository or "
                "hub:owner/repository@revision"
            )
        try:
            import huggingface_hub  # noqa: F401
        except ImportError as error:
            raise VitrailError(
                f"{source} needs the hub extra: pip install 'vitrail[hub]'"
            ) from error
        return cls(parts[1], parts[2] or "main", folder)

    @property
    def endpoint(self) -> str:
        return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")

    def fetch(self) -> Path:
        """The folder, from the cache or from the hub."""
        return self.cached() or self.download()

    def cached(self) -> Path | None:
        """The folder, if it was fetched before."""
        from huggingface_hub import try_to_load_from_cache

        def found(file: str) -> str | None:
            path = try_to_load_from_cache(
                self.name, file, cache_dir=self.folder, revision=self.revision
            )
            return path if isinstance(path, str) else None

        config = found("config.json")
        return Path(config).parent if config and any(map(found, WEIGHTS)) else None

    def download(self) -> Path:
        """Weights first: the configuration comes last and so vouches for a checked folder."""
        weights = next(filter(None, map(self.file, WEIGHTS)), None)
        self.file("preprocessor_config.json")
        config = self.file("config.json")
        if not weights or not config:
            missing = "config.json" if weights else " or ".join(WEIGHTS)
            raise VitrailError(
                f"{self.name} on {host_of(self.endpoint)} has no {missing}; choose a repository "
                "that holds a model"
            )
        if weights.parent != config.parent:
            raise FailureError(f"{self.name} changed while it was being fetched; run again")
        return config.parent

    def file(self, name: str) -> Path | None:
        """One file, checked, or nothing where the repository has none of that name."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import RemoteEntryNotFoundError

        where = {"revision": self.revision, "endpoint": self.endpoint}
        try:
            # Also the quickest way to learn that one is offline: the download itself insists.
            about = get_hf_file_metadata(hf_hub_url(self.name, name, **where))
            path = Path(hf_hub_download(self.name, name, cache_dir=self.folder, **where))
        except RemoteEntryNotFoundError:
            return None
        except Exception as error:  # its transport's errors, and its transport, vary by version
            raise self.error(name, error) from error
        # Small files carry a git hash here, which is not that of their bytes alone.
        sha256 = re.fullmatch(r"[0-9a-f]{64}", about.etag or "")
        if sha256 and (damage := damage_of(path, {"sha256": sha256[0]})):
            path.resolve().unlink()  # the bytes; `path` is a link to them
            path.unlink(missing_ok=True)
            raise damaged(name, self.name, damage)
        return path

    def error(self, file: str, error: Exception) -> VitrailError:
        """The line a user reads when the hub refuses or cannot be reached."""
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
            f"cannot fetch {file} of {self.name} from {host} ({reason_of(error)}) and it is not in "
            "the hub's cache; connect, or download the repository elsewhere and give its path"
        )
