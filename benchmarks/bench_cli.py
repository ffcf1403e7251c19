"""How long commands take that a person waits for: `python benchmarks/bench_cli.py`."""

import subprocess
import sys
import time
from pathlib import Path

UNSKEW = str(Path(sys.executable).parent / "unskew")


def best(*command: str, runs: int = 7) -> float:
    """Least wall time of a command in milliseconds."""
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(1000 * (time.perf_counter() - started))
    return min(times)


if __name__ == "__main__":
    bare = best(sys.executable, "-c", "pass")
    for arguments in (["--help"], ["diagnose", "--help"], ["demo", "--recorded"]):
        print(f"unskew {' '.join(arguments):18s} {best(UNSKEW, *arguments):6.0f} ms  (bare Python {bare:.0f} ms)")
