"""Check 3: FSDPTrainer with one worker process (NCCL on a GPU) in bfloat16, against BasicTrainer in float32."""

from __future__ import annotations

import re

from scripts.gpu_checks.common import TINY, WORDS, Outcome, Run, Setting
from scripts.gpu_checks.demo import distance
from scripts.gpu_checks.table import BFLOAT16_BAND

COMMON = (f"model.name_or_path={TINY}", "model.block_name=LlamaDecoderLayer", "loss=dpo", "loss.beta=0.1",
          "datasets=[hh]", f"dataset_sources.hh={WORDS}", "batch_size=4", "eval_batch_size=2", "n_eval_examples=2",
          "n_eval_model_samples=2", "max_length=96", "max_prompt_length=64", "eval_every=48", "do_first_eval=false",
          "lr=1e-5", "warmup_steps=2", "optimizer=RMSprop", "n_epochs=null")  # fmt: skip
FSDP = ("trainer=FSDPTrainer", "world_size=1", "model.fsdp_policy_mp=bfloat16", "model.reference_dtype=bfloat16",
        "resume=auto")  # fmt: skip
BATCH, HALF, WHOLE = 4, 48, 80  # examples: per update, until it stops, in total


def check(setting: Setting) -> Outcome:
    plain = Run(setting, "plain", *COMMON, "sample_during_eval=false", f"n_examples={WHOLE}")
    first = Run(setting, "fsdp", *COMMON, *FSDP, f"n_examples={HALF}", NCCL_DEBUG="VERSION").done()
    nccl = re.search(r"NCCL version \S+", first.text())
    saved = sorted(path.name for path in first.directory.glob("step-*"))
    second = Run(setting, "fsdp", *COMMON, *FSDP, f"n_examples={WHOLE}").done()
    updates, wanted = second.records(split="train"), plain.done().records(split="train")
    samples = second.records("samples.jsonl")

    far = dict.fromkeys(BFLOAT16_BAND, 0.0)
    for ours, theirs in zip(updates, wanted, strict=False):
        for key, value in theirs.items():
            kind = next((k for k in far if key.startswith(k)), None)
            if kind and not key.endswith("accuracies"):
                far[kind] = max(far[kind], distance(ours[key], value, key))
    complete = [u["examples"] for u in updates] == [*range(BATCH, WHOLE + 1, BATCH)]
    faults = [
        *(["updates are missing or duplicated"] if not complete else []),
        *([f"saved {saved} before it was resumed"] if f"step-{HALF}" not in saved else []),
        *(["no samples"] if not samples else []),
        *(f"{kind} off by {d:.1e} (of {BFLOAT16_BAND[kind]:g})" for kind, d in far.items() if d > BFLOAT16_BAND[kind]),
    ]
    version = nccl[0] if nccl else "NCCL, which did not give its version"
    over = version if setting.gpu else "gloo (NCCL needs a GPU)"
    figure = "; ".join(faults) or (
        f"over {over}: {len(updates)} updates, resumed after {HALF // BATCH}, {len(samples)} samples; "
        + "against float32 "
        + ", ".join(f"{kind} {d:.1e}" for kind, d in far.items())
    )
    return Outcome(not faults, figure, {"distance": far, "over": over, "samples": len(samples), "saved": saved})
