"""What the machine itself tells: the most memory that was in use, and the energy a GPU took."""

import ctypes
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

STATUS = Path("/proc/self/status")


def reset_peak(device: torch.device) -> None:
    """Forget earlier peaks, where the system can; elsewhere the peak is that of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError, AttributeError):
        # What is free but was not given back to the system would hide the next rise.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory(device: torch.device) -> int:
    """Bytes: those that tensors had on a GPU at most; elsewhere the process's largest size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():
        # Unlike getrusage's, this figure can be reset.
        text = STATUS.read_text(encoding="utf-8", errors="replace")
        line = next((line for line in text.splitlines() if line.startswith("VmHWM:")), "")
        if line:
            return 1024 * int(line.split()[1])
    return largest_size()


def largest_size() -> int:
    """The process's largest size ever, in bytes; zero where the system has no such figure."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


def energy(device: torch.device) -> float | None:
    """Joules that a GPU has taken since its driver was loaded; None where the driver has no count.

    It is asked directly, through the library that comes with it, so nothing needs installing.
    """
    library = driver() if device.type == "cuda" else None
    if library is None:
        return None
    return counted(library, str(torch.cuda.get_device_properties(device).uuid))


def counted(library: Any, uuid: str) -> float | None:
    """Joules of the GPU with that number; every answer but zero is a refusal."""
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    name = f"GPU-{uuid.removeprefix('GPU-')}"
    if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
        return None
    if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
        return None
    return millijoules.value / 1000


@cache
def driver() -> ctypes.CDLL | None:
    """NVIDIA's management library, ready to be asked."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library
