"""`unskew measure` on a Parquet trace beside a plain pyarrow + numpy k3 scan of the same file, in the same run.

python benchmarks/bench_measure.py [--tokens 10000000]
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def generate(path: Path, tokens: int) -> None:
    """A trace of `tokens` tokens with float noise, 1,000 a sequence."""
    rng = np.random.default_rng(0)
    schema = pa.schema(
        {"response_ids": pa.list_(pa.int32()), "rollout_logp": pa.list_(pa.float32()), "old_logp": pa.list_(pa.float32())}
    )
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, tokens, 1_000_000):
            n = min(1_000_000, tokens - start)
            offsets = pa.array(np.append(np.arange(0, n, 1000), n).astype(np.int32))
            rollout = -rng.exponential(0.7, n).astype(np.float32)
            old = np.minimum(rollout + rng.normal(0, 0.03, n), 0.0).astype(np.float32)
            columns = [pa.array(rng.integers(0, 150_000, n).astype(np.int32)), pa.array(rollout), pa.array(old)]
            writer.write_table(pa.Table.from_arrays([pa.ListArray.from_arrays(offsets, c) for c in columns], schema=schema))


def scan(path: str) -> float:
    """Mean k3, nothing else, straight from the file."""
    total, count = 0.0, 0
    for batch in pq.ParquetFile(path).iter_batches(batch_size=1024, columns=["rollout_logp", "old_logp"]):
        rollout, old = (batch[name].flatten().to_numpy() for name in ("rollout_logp", "old_logp"))
        d = old.astype(np.float64) - rollout
        total, count = total + float((np.expm1(d) - d).sum()), count + len(d)
    return total / count


def measured(path: str) -> float:
    """k3 from the full measurement."""
    from unskew.measure import measure_path

    value = measure_path(path).overall["kl_rollout_old_k3"].value
    assert value is not None
    return value


def main() -> None:
    """Time each in a process of its own, three times, twice over, and print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--run", choices=["scan", "measured"])
    parser.add_argument("--path")
    args = parser.parse_args()
    if args.run:
        import unskew.measure  # noqa: F401 - neither side's imports are timed

        passes = []
        for _ in range(2):
            started = time.perf_counter()
            value = {"scan": scan, "measured": measured}[args.run](args.path)
            passes.append(time.perf_counter() - started)
        print(*passes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, value)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.parquet"
        generate(path, args.tokens)
        best = {}
        for name in ("scan", "measured"):
            runs = []
            for _ in range(3):
                command = [sys.executable, __file__, "--run", name, "--path", str(path)]
                out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
                runs.append(tuple(float(x) for x in out))
            first, again, memory, value = best[name] = tuple(np.median(runs, axis=0))
            rate = args.tokens / again / 1e6
            print(
                f"{name:9s} {again:5.2f} s  {rate:5.1f} M tokens/s  peak {memory:4.0f} MiB  k3 {value:.6e}  first pass {first:.2f} s"
            )
        first, again = (best["scan"][k] / best["measured"][k] for k in (0, 1))
        print(f"measure runs at {again:.2f} × the speed of the plain k3 scan ({first:.2f} × with what a new process loads)")


if __name__ == "__main__":
    main()
