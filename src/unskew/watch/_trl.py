"""What TRL's GRPOTrainer itself saw of each batch, written as a trace."""

from pathlib import Path
from typing import Any

from unskew._errors import UnskewError, require
from unskew.trace import Trace, write

__all__ = ["TRLRecorder"]


class TRLRecorder:
    """Writes both log-prob streams of every generated batch of a `trl.GRPOTrainer`.

    One line after the trainer is made; each batch becomes one file `step-<global step>-<n>.parquet` in `directory`,
    complete or absent. `unskew diagnose 'DIRECTORY/*.parquet' --model CHECKPOINT` reads them.

    With vLLM, `rollout_logp` is what vLLM logged. With transformers' generate it is the log-softmax of the scores that
    the token was drawn from, taken from the same `generate` call. `old_logp` is TRL's own where it computes it, else
    one more forward of the trainer's function at the same weights.

    Args:
        trainer: a `trl.GRPOTrainer`, before `train()`.
        directory: where the files go.

    Raises:
        UnskewError: not a GRPOTrainer of a TRL that has the methods this hooks.

    Example:
        >>> from trl import GRPOTrainer  # doctest: +SKIP
        >>> TRLRecorder(trainer := GRPOTrainer(...), "traces")  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(self, trainer: Any, directory: str | Path) -> None:
        hooks = ("_generate_single_turn", "_generate_and_score_completions", "_get_per_token_logps_and_entropies")
        missing = [name for name in hooks if not hasattr(trainer, name)]
        if missing:
            raise UnskewError(
                f"{type(trainer).__name__} has no {', '.join(missing)}", hint="this hooks TRL 1.16's GRPOTrainer", exit_code=2
            )
        self.directory = Path(directory)
        self.n_batches = 0
        self._trainer = trainer
        self._sampled: list[tuple[tuple[int, ...], list[float]]] = []
        self._score, self._turn = trainer._generate_and_score_completions, trainer._generate_single_turn
        trainer._generate_and_score_completions = self._generate_and_score
        if not trainer.use_vllm:
            trainer._generate_single_turn = self._generate_with_scores

    def _generate_with_scores(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's generation, with the log-prob of each drawn token kept from the same call."""
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        generate = model.generate

        def recording(*inner: Any, **options: Any) -> Any:
            output = generate(*inner, **options, output_scores=True, return_dict_in_generate=True)
            sampled = output.sequences[:, -len(output.scores) :]
            steps = [s.float().log_softmax(-1).gather(1, sampled[:, t : t + 1])[:, 0] for t, s in enumerate(output.scores)]
            for tokens, logp in zip(sampled.tolist(), zip(*(s.tolist() for s in steps), strict=True), strict=True):
                self._sampled.append((tuple(tokens), list(logp)))
            return output.sequences

        model.generate = recording
        try:
            return self._turn(*args, **kwargs)
        finally:
            del model.generate

    def _generate_and_score(self, inputs: Any) -> Any:
        self._sampled.clear()
        batch = self._score(inputs)
        self._write(batch, inputs)
        return batch

    def _write(self, batch: dict[str, Any], inputs: Any) -> None:
        torch = require("torch", extra="trl")
        trainer = self._trainer
        completion, mask = batch["completion_ids"], batch["completion_mask"]
        old = batch.get("old_per_token_logps")
        if old is None:
            ids = torch.cat([batch["prompt_ids"], completion], dim=1)
            attention = torch.cat([batch["prompt_mask"], mask], dim=1)
            with torch.no_grad():
                old = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, attention, completion.size(1), batch_size=trainer.args.per_device_train_batch_size
                )[0]
        args, step = trainer.args, int(trainer.state.global_step)
        sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": max(args.top_k or 0, 0), "min_p": args.min_p,
                    "repetition_penalty": args.repetition_penalty, "logprobs_mode": "processed"}  # fmt: skip
        source = self._source()
        rows = []
        for k in range(len(completion)):
            keep = mask[k].bool()
            n = int(keep.sum())
            if not n:
                continue
            tokens = completion[k][keep].tolist()
            rows.append({
                "id": f"{step}-{self.n_batches}-{k}", "group_id": f"{step}-{self.n_batches}-{k // trainer.num_generations}", "step": step,
                "prompt_ids": batch["prompt_ids"][k][batch["prompt_mask"][k].bool()].tolist(), "response_ids": tokens,
                "rollout_logp": self._rollout(batch, k, tokens, keep), "old_logp": old[k][keep].tolist(),
                "advantage": [float(batch["advantages"][k].reshape(-1)[0])] * n, "old_version": step, "train_version": step,
                "weight_version": [step] * n, "sampling": sampling, "source": source,
                "trainer": {"framework": "trl", "dtype": str(trainer.model.dtype).removeprefix("torch."), "temperature": args.temperature,
                            "mode": "train" if trainer.model.training else "eval"},
                "sampled": "uniform", "selection": "none",
            })  # fmt: skip
        self.directory.mkdir(parents=True, exist_ok=True)
        write(Trace.from_rows(rows), self.directory / f"step-{step:06d}-{self.n_batches:06d}.parquet", force=True)
        self.n_batches += 1

    def _source(self) -> dict[str, str]:
        """The engine, and its dtype where it runs in this process (vLLM's server does not tell)."""
        trainer = self._trainer
        if not trainer.use_vllm:
            return {"engine": "transformers", "dtype": str(trainer.model.dtype).removeprefix("torch.")}
        if trainer.vllm_mode == "colocate":
            return {"engine": "vllm", "dtype": str(trainer.vllm_generation.llm.model_config.dtype).removeprefix("torch.")}
        return {"engine": "vllm"}

    def _rollout(self, batch: dict[str, Any], k: int, tokens: list[int], keep: Any) -> list[float]:
        if "sampling_per_token_logps" in batch:
            return batch["sampling_per_token_logps"][k][keep].tolist()
        for sampled, logp in self._sampled:
            if sampled[: len(tokens)] == tuple(tokens):
                return logp[: len(tokens)]
        raise UnskewError(
            f"completion {k} was not sampled by the recorded generate call", hint="record without a custom rollout_func"
        )
