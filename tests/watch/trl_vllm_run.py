"""Three GRPO steps with colocated vLLM in a process of their own: OUTPUT synced|unsynced; leaves traces and checkpoints."""

import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

import datasets
import torch
import transformers
import trl

from unskew.lab import model_path, prompts, reward
from unskew.watch import TRLRecorder


def score(prompts, completions, **_):
    return [reward(p[-1]["content"], c[0]["content"]) for p, c in zip(prompts, completions, strict=True)]


def main(output: str, sync: str) -> None:
    path = str(model_path("dense-old-3"))
    args = trl.GRPOConfig(
        output_dir=f"{output}/run", per_device_train_batch_size=16, num_generations=8, max_completion_length=48, max_steps=4,
        report_to=[], use_cpu=True, bf16=False, fp16=False, temperature=1.0, save_strategy="steps", save_steps=1, learning_rate=2e-3,
        lr_scheduler_type="constant", disable_tqdm=True, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=256, seed=0,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=score,
        args=args,
        train_dataset=datasets.Dataset.from_list([{"prompt": messages} for messages in prompts(16, seed=5)]),
        processing_class=transformers.AutoTokenizer.from_pretrained(path),
    )
    generation = trainer.vllm_generation

    # vLLM's CPU build prepacks linear weights, so TRL's own push fails there; this is the same push by vLLM's other door.
    def push() -> None:
        weights = [(name, parameter.data) for name, parameter in generation.model.named_parameters()]
        generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        generation.llm.reset_prefix_cache()

    generation.sync_weights = push if sync == "synced" else generation.llm.reset_prefix_cache
    TRLRecorder(trainer, f"{output}/traces")
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
