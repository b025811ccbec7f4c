"""What the benchmark reads of the machine: CPU time of process trees, and what it runs on."""

import os
import platform
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def describe_machine() -> dict[str, str | int | float]:
    """Return what the figures were measured on."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "cpus": os.cpu_count() or 1,
        "cpu": model,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def tree_cpu_s(root: int) -> float:
    """Return user and system CPU seconds of a process, its descendants and its reaped children."""
    children: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        fields = text[text.rindex(")") + 2 :].split()
        pid = int(entry.name)
        children.setdefault(int(fields[1]), []).append(pid)
        used[pid] = sum(int(value) for value in fields[11:15]) / _TICKS
    total, pending = 0.0, [root]
    while pending:
        pid = pending.pop()
        total += used.get(pid, 0.0)
        pending.extend(children.get(pid, []))
    return total


def percentile(values: list[float], share: float) -> float:
    """Return the value below which that share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]
