"""TRL's GRPOTrainer, run for real: what it sampled and scored comes out as a trace that diagnosis reads."""

import warnings

import pytest

from unskew.diagnose import diagnose
from unskew.lab import model_path, prompts, reward
from unskew.trace import lint, read
from unskew.watch import TRLRecorder


@pytest.mark.filterwarnings("ignore")
def test_recorded_run_agrees_at_fp32(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets
        import torch
        import transformers
        import trl

        torch.manual_seed(0)
        path = str(model_path("dense-old-3"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        data = datasets.Dataset.from_list([{"prompt": messages} for messages in prompts(16, seed=5)])

        def score(prompts, completions, **_):
            return [reward(p[-1]["content"], c[0]["content"]) for p, c in zip(prompts, completions, strict=True)]

        args = trl.GRPOConfig(
            output_dir=str(tmp_path / "run"), per_device_train_batch_size=8, num_generations=4, max_completion_length=48, max_steps=3,
            logging_steps=1, report_to=[], use_cpu=True, bf16=False, fp16=False, temperature=0.9, save_strategy="no", learning_rate=1e-4,
            disable_tqdm=True,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        trainer = trl.GRPOTrainer(model=model, reward_funcs=score, args=args, train_dataset=data, processing_class=tokenizer)
        recorder = TRLRecorder(trainer, tmp_path / "traces")
        trainer.train()
    assert recorder.n_batches == 3
    trace = read(str(tmp_path / "traces" / "*.parquet"))
    assert len(trace) == 24
    assert sorted(set(trace.rows("step"))) == [0, 1, 2]
    assert not lint(trace).excluded.any()
    gap = trace.tokens("old_logp") - trace.tokens("rollout_logp")
    assert abs(gap).max() < 1e-3
    assert diagnose(trace).verdict == "clean"
