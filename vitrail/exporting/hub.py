"""A folder that others load, with a model card, ready for the Hugging Face hub."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from vitrail.console import say
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.exporting.card import write_card
from vitrail.files import write_json
from vitrail.model import Architecture
from vitrail.model.variants import name
from vitrail.model.vit import ViTArchitecture
from vitrail.runs import find_run, is_run
from vitrail.weights.convert import Parity, convert
from vitrail.weights.load import load, resolve

Library = Literal["timm", "transformers"]
FILES = ["README.md", "config.json", "model.safetensors", "preprocessor_config.json"]


def export_hub(
    model: str | Path, target: str | Path, *, to: Library = "timm", upload: str = ""
) -> Parity:
    """Writes weights, config and model card into a folder, compares, and uploads where asked."""
    folder = Path(target)
    api = logged_in() if upload else None
    if folder.exists() and (not folder.is_dir() or is_run(folder)):
        raise VitrailError(f"{folder} is not a folder for a repository; name a new one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FailureError(f"cannot create {folder} ({one_line(error)})") from None
    parity = convert(model, folder, to="huggingface" if to == "transformers" else "timm")
    loaded = load(model)
    if to == "timm":
        name_for_timm(folder / "config.json", loaded.architecture)
    write_card(folder, loaded, find_run(resolve(model)[0]), to, upload)
    if parity.holds and api is not None:
        send(api, folder, upload)
    elif parity.holds and has_token():
        say("next    look at its README.md, then run this again with --upload OWNER/NAME")
    return parity


def has_token() -> bool:
    """Whether the hub may know the user; nobody is asked."""
    if find_spec("huggingface_hub") is None:
        return False
    from huggingface_hub import get_token

    return get_token() is not None


def name_for_timm(path: Path, a: Architecture) -> None:
    """The GELU too: a converted file leaves that to timm's own, a repository must not."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if "architecture" not in config:
        raise VitrailError(
            f"timm has no name for {name(a)}; use --to transformers, or vitrail convert"
        )
    if isinstance(a, ViTArchitecture):
        config["model_args"]["act_layer"] = "gelu_tanh" if a.gelu == "tanh" else "gelu"
    write_json(path, config)


def logged_in() -> Any:
    """The hub, where the user is known to it."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
    except ImportError:
        raise VitrailError("--upload needs the hub extra: pip install 'vitrail[hub]'") from None
    api = HfApi()
    try:
        api.whoami()
    except LocalTokenNotFoundError:
        raise VitrailError("--upload: you are not logged in; run 'hf auth login'") from None
    except (HfHubHTTPError, OSError) as error:
        raise FailureError(f"the hub does not know you ({one_line(error)}); log in again") from None
    return api


def send(api: Any, folder: Path, repository: str) -> None:
    """All that belongs to the repository, and nothing else that may lie in the folder."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=FILES,
            commit_message="Model exported by Vitrail",
        )
    except HFValidationError as error:
        raise VitrailError(f"--upload {repository}: {one_line(error)}") from None
    except (HfHubHTTPError, OSError) as error:
        raise FailureError(f"cannot upload to {repository} ({one_line(error)})") from None
