"""Every verb as a user runs it."""

import json
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from PIL import Image

import vitrail
from tests.models import small
from vitrail.cli import main


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vitrail", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_lists_the_verbs_in_the_order_of_data_flow_and_fast():
    started = time.perf_counter()
    result = run("--help")
    seconds = time.perf_counter() - started
    assert result.returncode == 0
    listed = result.stdout.split("Commands:")[1]
    assert [line.split()[0] for line in listed.splitlines() if line.strip()] == [
        "demo",
        "models",
        "data",
        "config",
        "train",
        "sweep",
        "evaluate",
        "fewshot",
        "predict",
        "inspect",
        "benchmark",
        "convert",
        "export",
        "paper",
        "report",
        "serve",
        "runs",
    ]
    assert seconds < 1.5  # torch alone takes longer


def test_help_and_models_do_not_import_torch():
    verbs = ("demo", "models", "data", "config", "train", "sweep", "evaluate", "convert", "report")
    helps = [
        f"['{verb}', '--help']"
        for verb in (
            *(*verbs, "fewshot", "predict", "inspect", "benchmark", "export", "serve", "paper"),
            "runs",
        )
    ]
    calls = ["['--help']", *helps, "['models']", "['config', 'finetune/folder']", "['paper']"]
    code = "import sys\nfrom vitrail.cli import main\n"
    for call in calls:
        code += f"try:\n    main({call})\nexcept SystemExit:\n    pass\n"
        code += "assert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_predict_imports_little_beside_torch(tmp_path):
    Image.new("RGB", (40, 30), "teal").save(tmp_path / "a.png")
    slow = ("torchvision", "torch._dynamo", "torch.distributed.fsdp", "sympy", "matplotlib")
    code = "import sys\nfrom vitrail.cli import main\n"
    code += f"try:\n    main(['predict', 'builtin', {str(tmp_path / 'a.png')!r}])\n"
    code += f"except SystemExit:\n    pass\nassert not sys.modules.keys() & set({slow})\n"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 5


def test_models_lists_names_with_cost_and_source():
    result = run("models", "B/16-in21k")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == ["name", "parameters"]
    assert any("B/16-in21k-in1k-384" in line and "83.97%" in line for line in lines)


def test_models_as_json_is_one_value_with_the_promised_keys():
    rows = json.loads(run("models", "--json").stdout)
    assert len(rows) > 100
    assert all(
        {"name", "parameters", "gmacs", "tokens", "top1", "cited"} <= set(row) for row in rows
    )
    by_name = {row["name"]: row for row in rows}
    assert by_name["B/16"]["parameters"] == 86_567_656


@pytest.fixture
def weights(tmp_path):
    vitrail.save(small("vit"), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_convert_reports_parity_and_the_switch(weights, tmp_path):
    result = run("convert", weights, tmp_path / "out.npz", "--to", "google")
    assert result.returncode == 0, result.stderr
    assert "largest difference 0.0e+00 in logits, 0.0e+00 in features" in result.stdout
    assert "switch" in result.stdout
    again = run("convert", tmp_path / "out.npz", tmp_path / "hub", "--to", "huggingface", "--json")
    parity = json.loads(again.stdout)
    assert parity["difference"] < 1e-6
    assert parity["switch"] > 0
    assert (parity["gelu"], parity["eps"]) == ("erf", 1e-12)
    assert (tmp_path / "hub" / "config.json").exists()


def test_convert_can_change_the_size(weights, tmp_path):
    result = run(
        "convert", weights, tmp_path / "b.safetensors", "--to", "vitrail", "--size", "96x64"
    )
    assert result.returncode == 0, result.stderr
    assert vitrail.load(tmp_path / "b.safetensors").architecture.size == (96, 64)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["models", "no-such-model"], "no model name contains 'no-such-model'"),
        (["convert", "B/17", "x.npz", "--to", "google"], "neither a file nor a published name"),
        (["convert", "B/16-in21", "x.npz", "--to", "google"], "did you mean 'B/16-in21k'"),
        (["convert", "{weights}", "x.xyz", "--to", "timm"], ".xyz"),
        (["convert", "{weights}", "x.npz", "--to", "timm"], "timm checkpoints are .safetensors"),
        (["convert", "{weights}", "x.npz", "--to", "google", "--size", "big"], "--size big"),
        (["convert", "{weights}", "x.npz", "--to", "keras"], "keras"),
        (["convret"], "convret"),
        (["config", "digits/vti"], "no recipe named 'digits/vti'; did you mean 'digits/vit'"),
        (["config", "digits/vit", "optim.lrr=1"], "did you mean 'optim.lr'"),
        (["train", "no/such/folder"], "neither a recipe nor a folder nor a known dataset"),
        (["train", "digits/vit", "train.batch=0"], "train.batch = 0: expected"),
        (["train", "digits/vit", "optim.lr=[1,2]"], "a list is for `vitrail sweep`"),
        (["train", "digits/vit", "--device", "abacus"], "--device abacus"),
        (["sweep", "finetune/pets", "--best"], "--best compares several recipes; name two"),
        (["data", "flower_photo"], "did you mean 'flower_photos'"),
        (["data", "digits", "--filtered", "x.txt"], "need --duplicates or --against DATA"),
        (["evaluate", "{weights}", "digits"], "this model has no preprocessing"),
        (["benchmark", "no-such-model"], "neither a file nor a published name"),
        (["benchmark", "Ti/16", "--sizes", "big"], "--sizes big: expected comma-separated numbers"),
        (["benchmark", "Ti/16", "--batches", "0"], "--batches 0: expected"),
        (["inspect", "{weights}", "x.jpg", "--out", "x"], "this model has no preprocessing"),
        (["inspect", "{weights}", "--out", "x", "--layers", "first"], "--layers first: expected"),
        (["inspect", "{weights}", "--out", "x", "--layers", "2"], "no attention layer 2: they are"),
        (["inspect", "{weights}", "--out", "x", "--class", "cat"], "this model has no class 'cat'"),
        (
            ["inspect", "{weights}", "--out", "x", "--size", "8"],
            "smaller than a patch of 16 pixels",
        ),
        (["report", "no-run"], "no-run is not a run folder"),
        (["runs", "no-runs"], "no runs found in no-runs"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, complaint, weights, tmp_path):
    words = [argument.format(weights=weights) for argument in arguments]
    result = CliRunner().invoke(main, words)  # in this process: torch is there already
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert len([line for line in result.stderr.splitlines() if line.startswith("Error")]) == 1


def test_a_broken_file_is_one_line(tmp_path):
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 nothing")
    result = run("convert", tmp_path / "broken.npz", tmp_path / "x.npz", "--to", "google")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "broken.npz" in result.stderr


def test_an_offline_machine_hears_so_in_one_line(tmp_path):
    """The name resolves; the address cannot be reached through a proxy that is not there."""
    import os

    closed = {"https_proxy": "http://127.0.0.1:9", "VITRAIL_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "vitrail", "convert", "Ti/16-augreg-in21k", "x.npz"]
    result = subprocess.run(
        [*command, "--to", "google"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | closed,
    )
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error")]
    assert len(errors) == 1
    assert "cannot reach storage.googleapis.com" in errors[0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["trian"], "Error: No such command 'trian'. Did you mean 'train'?"),
        (["--foo"], "Error: No such option '--foo'; see `vitrail --help`"),
        (["evaluate", "x"], "Error: Missing argument 'DATA'; see `vitrail evaluate --help`"),
        (["models", "--foo"], "Error: No such option '--foo'; see `vitrail models --help`"),
    ],
)
def test_a_mistake_in_the_usage_is_one_line(arguments, line):
    result = CliRunner().invoke(main, arguments, prog_name="vitrail")
    assert (result.exit_code, result.stderr) == (2, f"{line}\n")
