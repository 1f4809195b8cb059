"""Start-up of the command line: `vitrail --help`, and `vitrail predict` of one image.

    python benchmarks/startup.py [--rounds 9] [--image photo.jpg]

A prediction with the built-in model is compared with the least that any program would do: import
torch, read the same weights, and run one forward pass of the same size. Every round starts one
process of each, in turns, so that whatever else the machine does falls on all of them. Figures are
medians over the rounds after the first, and the ratio is the median of the rounds' ratios.
Wall-clock time decides on an idle machine; on a shared one, processor time is steadier.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import vitrail
from vitrail.devices import cores, processor

PACKAGE = Path(vitrail.__file__).parent
BARE = """
import sys
import torch
from safetensors.torch import load_file

weights = load_file(sys.argv[1])
depth, width, hidden, tokens = map(int, sys.argv[2:])
layer = torch.nn.TransformerEncoderLayer(width, 3, hidden, norm_first=True).eval()
with torch.inference_mode():
    x = torch.zeros(tokens, 1, width)
    for _ in range(depth):
        x = layer(x)
"""


def commands(image: str) -> dict[str, list[str]]:
    """What is timed."""
    model = vitrail.load("builtin")
    a = model.architecture
    tokens = model.tokens(torch.zeros(1, a.channels, *a.size)).shape[1]
    shape = map(str, (a.depth, a.width, a.mlp, tokens))
    program = [sys.executable, "-m", "vitrail"]
    return {
        "vitrail --help": [*program, "--help"],
        "import torch": [sys.executable, "-c", "import torch"],
        "import torch, weights, forward": [
            *(sys.executable, "-c", BARE, str(PACKAGE / "builtin" / "model.safetensors"), *shape),
        ],
        "vitrail predict builtin IMAGE": [*program, "predict", "builtin", image, "--device", "cpu"],
    }


def seconds(command: list[str]) -> tuple[float, float]:
    """Of one process, on the wall and of all processors."""
    wall, before = time.perf_counter(), os.times()
    subprocess.run(command, check=True, capture_output=True)
    after = os.times()
    busy = after.children_user + after.children_system
    busy -= before.children_user + before.children_system
    return time.perf_counter() - wall, busy


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--image", default=str(PACKAGE / "serving" / "daisy.jpg"))
    arguments = parser.parse_args()
    timed = commands(arguments.image)
    rounds = [[seconds(one) for one in timed.values()] for _ in range(arguments.rounds + 1)][1:]
    print(f"torch {torch.__version__} · Python {platform.python_version()} · {processor()}")
    print(f"{cores()} cores · {len(rounds)} rounds")
    print(f"{'':32}{'seconds':>10}{'of CPU':>10}")
    for name, values in zip(timed, zip(*rounds, strict=True), strict=True):
        wall, busy = map(statistics.median, zip(*values, strict=True))
        print(f"{name:32}{wall:10.3f}{busy:10.3f}")
    wall, busy = (statistics.median(row[3][i] / row[2][i] for row in rounds) for i in (0, 1))
    print(f"{'ratio of the last two':32}{wall:10.3f}{busy:10.3f}")


if __name__ == "__main__":
    main()
