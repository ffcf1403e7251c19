"""`unskew record`: sample from an engine and write a trace."""

import json
from pathlib import Path
from typing import Any

import click

from unskew._errors import UnskewError
from unskew.cli._output import emit, force_option, json_option, say


@click.command(epilog="Exit codes: 0 written, 2 usage, 4 unreadable or invalid input.")
@click.option("--engine", default="hf", show_default=True, type=click.Choice(["hf", "vllm"]))
@click.option("--model", required=True, type=click.Path(), help="Checkpoint to sample from.")
@click.option("--prompts", required=True, type=click.Path(), help='JSONL with "prompt_ids", "prompt" or "messages" a line.')
@click.option("-o", "--out", required=True, type=click.Path(), help="Directory, .parquet or .jsonl to write.")
@click.option("--n", default=1, show_default=True, type=click.IntRange(1), help="Responses a prompt.")
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=1.0, show_default=True, type=click.FloatRange(min=0, min_open=True))
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(0, 1, min_open=True))
@click.option("--top-k", default=0, show_default=True, type=click.IntRange(0))
@click.option("--min-p", default=0.0, show_default=True, type=click.FloatRange(0, 1))
@click.option("--repetition-penalty", default=1.0, show_default=True, type=click.FloatRange(min=0, min_open=True))
@click.option("--logprobs-mode", default="raw", show_default=True, type=click.Choice(["raw", "processed"]))
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16", "float16"]))
@click.option("--prefill", is_flag=True, help="Also score each response by prefill in the same engine (vllm).")
@click.option("--batch", default=64, show_default=True, type=click.IntRange(1), help="Sequences sampled together.")
@click.option("--seed", default=0, show_default=True)
@force_option
@json_option
def command(
    engine: str, model: str, prompts: str, out: str, n: int, max_tokens: int, logprobs_mode: Any, dtype: str, prefill: bool, batch: int,
    seed: int, force: bool, as_json: bool, **sampler: Any,
) -> None:  # fmt: skip
    """Sample from an engine and write what it logged as a trace.

    \b
    unskew record --model DIR --prompts prompts.jsonl -o trace
    unskew record --engine vllm --model DIR --prompts prompts.jsonl -o trace --dtype bfloat16 --prefill
    """
    from dataclasses import replace

    from unskew.score import HFEngine, Sampling, VLLMEngine
    from unskew.trace import Trace, Writer

    if prefill and engine != "vllm":
        raise UnskewError("--prefill needs --engine vllm", hint="transformers scores by prefill with `unskew score`", exit_code=2)
    sampling = Sampling(max_tokens=max_tokens, logprobs_mode=logprobs_mode, seed=seed, **sampler)
    with Writer(
        out, force=force, provenance={"command": "unskew record", "engine": engine, "model": Path(model).name, "seed": seed}
    ) as writer:
        ids = _prompts(Path(prompts), model)
        if engine == "hf":
            sampler_engine = HFEngine.load(model, dtype=dtype, batch=batch)
        else:
            longest = max(len(prompt) for prompt in ids) + max_tokens + 1
            sampler_engine = VLLMEngine(model, dtype=dtype, logprobs_mode=logprobs_mode, prefill=prefill, max_model_len=longest)
        todo = [(k, prompt) for k, prompt in enumerate(ids) for _ in range(n)]
        rows = tokens = 0
        for start in range(0, len(todo), batch):
            part = todo[start : start + batch]
            got = sampler_engine.sample([prompt for _, prompt in part], sampling=replace(sampling, seed=seed + start))
            for offset, (row, (k, _)) in enumerate(zip(got, part, strict=True)):
                row |= {"id": f"{k}-{start + offset}", "group_id": str(k)}
            writer.append(Trace.from_rows(got))
            rows, tokens = rows + len(got), tokens + sum(len(row["response_ids"]) for row in got)
            say(f"{rows} of {len(todo)} responses, {tokens} tokens")
    result = {"schema_version": 1, "path": out, "n_rows": rows, "n_tokens": tokens}
    emit(result, as_json=as_json, human=lambda console: console.print(f"Wrote {out}: {rows} sequences, {tokens} tokens"))


def _prompts(path: Path, model: str) -> list[list[int]]:
    if not path.exists():
        raise UnskewError(f"{path}: no such file", hint='give JSONL with "prompt_ids", "prompt" or "messages" a line')
    tokenizer, out = None, []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UnskewError(f"{path} line {number}: not JSON: {error}", hint="one JSON object a line") from None
        if not isinstance(row, dict) or not row.keys() & {"prompt_ids", "prompt", "messages"}:
            raise UnskewError(f'{path} line {number}: none of "prompt_ids", "prompt", "messages"', hint="one of them a line")
        if "prompt_ids" in row:
            out.append([int(token) for token in row["prompt_ids"]])
            continue
        if tokenizer is None:
            tokenizer = _tokenizer(model)
        if "messages" in row:
            out.append(list(tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)))
        else:
            out.append(list(tokenizer(row["prompt"])["input_ids"]))
    if not out:
        raise UnskewError(f"{path}: no prompts")
    return out


def _tokenizer(model: str) -> Any:
    from unskew._errors import require

    path = Path(model)
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    return require("transformers", extra="hf").AutoTokenizer.from_pretrained(str(path.parent if where else path), **where)
