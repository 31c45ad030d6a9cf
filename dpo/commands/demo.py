"""SFT, then DPO, on synthetic dialogues, in `.cache/demo` (`make demo`); a new call continues an interrupted demo."""

import os
import subprocess
import sys
from pathlib import Path

from dpo.analysis.page import write_report
from dpo.analysis.runs import read_run
from dpo.commands import make_parser
from dpo.data.demo import COURTEOUS
from dpo.system.host import is_installed, python_process_options

DEMO = Path(".cache", "demo")
# do_first_sampling=true, as the page compares the samples with those before training
COMMON = """model=demo datasets=[demo] max_length=96 max_prompt_length=72 batch_size=32 eval_batch_size=64
    n_eval_examples=256 do_first_sampling=true schedule=cosine wandb.enabled=false resume=auto"""
STAGES = {
    "sft": "loss=sft optimizer=AdamW lr=3e-3 warmup_steps=50 n_epochs=4 eval_every=8192 n_eval_model_samples=64",
    # SGD is used, as other optimizers move all weights about equally far, even those unrelated to manners.
    "dpo": """loss=dpo model.archive={}/sft/LATEST loss.beta=0.5 optimizer=SGD lr=0.2 warmup_steps=10
        n_examples=1024 eval_every=512 n_eval_model_samples=256""",
}


def main(arguments: list[str]) -> int:
    make_parser("demo", __doc__).parse_args(arguments)
    for name, stage in STAGES.items():
        command = f"{stage.format(DEMO)} {COMMON} exp_name=demo_{name} local_run_dir={DEMO / name}".split()
        print(f"\n$ dpo train {' '.join(command)}\n", flush=True)
        # One thread suffices: with a model this small, several mostly wait for each other.
        process = python_process_options("-m", "dpo", "train", *command, OMP_NUM_THREADS="1")
        if subprocess.run(**process, check=False).returncode:
            sys.exit(f"the {name} stage failed; see its output above")
    samples = read_run(DEMO / "dpo").samples
    for n_examples in (0, samples[-1]["examples"]):
        answers = [sample["policy"].strip() for sample in samples if sample["examples"] == n_examples]
        share = sum(answer.startswith(COURTEOUS) for answer in answers) / len(answers)
        print(f"courteous answers to held-out prompts after {n_examples} examples of DPO: {share:.1%}")
    if not is_installed("matplotlib"):
        return 0
    page = write_report([DEMO / "dpo"], DEMO / "report")
    print(f"\nNow open {os.path.relpath(page)} in a browser: it also shows answers before and after DPO.")
    return 0
