"""A folder that others load, with a model card, ready for the Hugging Face hub."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from vitrail.console import say
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.exporting.card import write_card
from vitrail.model import Architecture, Classifier
from vitrail.model.resnet import ResNetArchitecture
from vitrail.model.variants import name
from vitrail.model.vit import ViTArchitecture
from vitrail.runs import Run, is_run
from vitrail.weights.converting import Parity, convert
from vitrail.weights.files import write_json
from vitrail.weights.loading import load

Library = Literal["timm", "transformers"]
RESNETS = {"R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4"}
"""Those that timm has."""
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
        name_for_timm(folder / "config.json", loaded)
    write_card(folder, loaded, run_of(Path(model)), to, upload)
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


def run_of(model: Path) -> Run | None:
    """The run that a MODEL is, or lies in."""
    found = next((folder for folder in (model, model.parent) if is_run(folder)), None)
    return None if found is None else Run(found, writes=False)


def name_for_timm(path: Path, model: Classifier) -> None:
    """What timm builds the model from: a name it knows, and what differs from that."""
    config = json.loads(path.read_text(encoding="utf-8"))
    known, arguments = timm_model(model.architecture)
    told = {"architecture": known, "model_args": config.get("model_args", {}) | arguments}
    # timm refuses what it does not know, and always smooths when it shrinks.
    config["pretrained_cfg"].pop("antialias", None)
    write_json(path, told | {k: v for k, v in config.items() if k != "model_args"})


def timm_model(a: Architecture) -> tuple[str, dict[str, Any]]:
    """timm's name, and arguments for its constructor."""
    if isinstance(a, ViTArchitecture) and a.backbone is None:
        return "vit_base_patch16_224", {
            "img_size": list(a.size),
            "patch_size": a.patch,
            "in_chans": a.channels,
            "embed_dim": a.width,
            "depth": a.depth,
            "num_heads": a.heads,
            "mlp_ratio": a.mlp / a.width,
            "class_token": a.class_token,
            "reg_tokens": a.registers,
            "no_embed_class": not a.class_slot,
            "init_values": a.layer_scale or None,
            "global_pool": {"class": "token", "mean": "avg", "attention": "map"}[a.pool],
            "fc_norm": a.norm_after_pool,
            "act_layer": "gelu_tanh" if a.gelu == "tanh" else "gelu",
        }
    ours = name(a)
    if isinstance(a, ResNetArchitecture) and ours in RESNETS:
        return f"resnetv2_{ours[1:]}_bit", {}
    raise VitrailError(f"timm has no name for {ours}; use --to transformers, or vitrail convert")


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
