"""Speed, memory and profile for the shapes of published models."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import pytest
import torch
import transformers
from support.gpu import (
    GPU,
    TINY,
    Process,
    build,
    describe,
    limit,
    measure_seconds,
    pick,
    random_pairs,
    write_model,
    write_pairs,
)

from dpo.models.answers import Answer, Sampling, answer
from dpo.settings.choices import VARLEN

SHAPES = {  # of published models
    "pythia-2.8b": {
        "model_type": "gpt_neox", "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 10240, "vocab_size": 50304, "max_position_embeddings": 2048, "use_parallel_residual": True,
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                          "partial_rotary_factor": 0.25},
    },
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}  # fmt: skip
PART_OF_MEMORY = 0.5  # for weights, gradients and optimizer state; the rest is for activations
BYTES = 8  # per parameter in bfloat16: policy, gradient, RMSprop's state, reference
LEAST_MFU = 0.2  # a guess: set without a GPU
LOSS_TOLERANCE = 0.02  # relative, between the layouts
TIMES_FASTER = 1.2
WORTH_SETTING = 1.02  # times as fast as the default
MEASURE = """
import json, sys
from benchmarks.harness import COMMON, measure_on_ranks
from benchmarks.profile import profile_run
from dpo.models import loading
from dpo.system.arithmetic import set_up_torch
from support.gpu import build
what, settings, updates, *overrides = sys.argv[1:]
loading.load_model = lambda name, *, dtype, attn_implementation, **_: build(
    json.loads(settings), dtype=dtype, attention=attn_implementation
)
set_up_torch(deterministic=False, compiles=False)
if what == "updates":
    measured = measure_on_ranks("compare:measure", [*COMMON, *overrides], int(updates))[0]
else:
    measured = profile_run([*COMMON, *overrides])
print("\\n" + json.dumps(measured))
"""
COLUMNS = ("pairs/s", "MFU", "GiB", "tokens/pair", "reference", "forward", "backward", "optimizer", "other", "idle",
           "attention", "products")  # fmt: skip


@pytest.mark.gpu
@pytest.mark.slow
@limit(270)
@pytest.mark.parametrize("name", pick((*SHAPES,), ("pythia-2.8b",), ("tiny",)))
def test_speed_of_shared_prefixes_and_of_padded_rows(name, tmp_path, record):
    """In processes of their own, by `benchmarks.compare`."""
    from benchmarks.compare import measure_peak

    batch, length, updates = pick((16, 512, 3), (16, 512, 2), (8, 128, 2))
    for split, n in (("train", (updates + 2) * batch), ("test", 8)):
        write_pairs(tmp_path / f"{split}.jsonl", n, tokens=length)
    settings = cut_to_memory(SHAPES[name]) if name in SHAPES else describe("llama", 3, 128, 4)
    common = ["loss=dpo", "loss.beta=0.1", "datasets=[made]", f"dataset_sources.made={tmp_path}",
              f"max_length={length}", f"max_prompt_length={length // 2}", f"batch_size={batch}",
              f"n_examples={(updates + 2) * batch}",
              f"gradient_accumulation_steps={batch // 4}",
              f"model.name_or_path={write_model(tmp_path / name, settings)}",
              *(("model.policy_dtype=bfloat16", "model.reference_dtype=bfloat16") if GPU else ())]  # fmt: skip
    peak = measure_peak(torch.bfloat16 if GPU else torch.float32)
    record(f"{settings['num_hidden_layers']} layers; peak {peak / 1e12:,.3g} TFLOP/s", peak=peak)
    found = {}
    ways = {"padded": ("layout=padded",), "shared_prefix": ("layout=shared_prefix",)}
    if GPU:
        ways[VARLEN] = ("layout=shared_prefix", f"model.attn_implementation={VARLEN}")
    record(f"{'':14}" + "".join(f"{column:>12}" for column in COLUMNS))
    for way, own in ways.items():
        measured = {}
        for what in ("updates", "profile"):
            asked = ("-c", MEASURE, what, json.dumps(settings), str(updates), *common, *own)
            done = Process(tmp_path, f"{way}-{what}", *asked, PYTHONPATH="tests").done()
            measured[what] = json.loads(done.text.splitlines()[-1])
        row = found[way] = summarize(measured["updates"], peak) | summarize_profile(measured["profile"])
        cells = "".join(f"{row[column]:>12{'.0%' if isinstance(row[column], Share) else '.2f'}}" for column in COLUMNS)
        record(f"{way:14}{cells}", **{f"{way} {key}": value for key, value in row.items()})
    padded, ours = found["padded"], found["shared_prefix"]
    assert ours["losses"] == pytest.approx(padded["losses"], rel=LOSS_TOLERANCE)
    if GPU:
        times = found[VARLEN]["pairs/s"] / ours["pairs/s"]
        better = VARLEN if times > WORTH_SETTING else "sdpa"
        record(f"varlen is {times:.2f} times as fast as sdpa: set model.attn_implementation={better}", times=times)
        assert found[VARLEN]["losses"] == pytest.approx(padded["losses"], rel=LOSS_TOLERANCE)
        assert ours["MFU"] >= LEAST_MFU
        assert ours["pairs/s"] >= TIMES_FASTER * padded["pairs/s"]


@pytest.mark.gpu
@pytest.mark.slow
@limit(150)
def test_speed_of_sampling_with_a_growing_and_with_a_static_cache(tmp_path, record):
    """Answers in float32 begin alike; times are of bfloat16, after a first round."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    n_new_tokens = pick(128, 128, 8)
    prompts = [pair.prompt for pair in random_pairs(16, prompt=(40, 120), response=(4, 4))]

    def sample_prompts(model: Any, cache: str | None, n_tokens: int) -> list[Answer]:
        sampling = Sampling(n_tokens, temperature=0, cache_implementation=cache)
        return answer(model, tokenizer, prompts, range(len(prompts)), sampling)

    settings = describe("llama", *pick((24, 2048, 16), (24, 1024, 16), (2, 64, 4)))
    found, ms = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        model = build(settings, dtype=dtype, attention="sdpa")
        for cache in (None, "static"):
            found[dtype, cache] = [given.tokens[:4] for given in sample_prompts(model, cache, n_new_tokens)]
            secs = [
                measure_seconds(lambda model=model, cache=cache: sample_prompts(model, cache, n_new_tokens))
                for _ in range(3)
            ]
            ms[dtype, cache] = 1000 * median(secs) / n_new_tokens
    growing, static = ms[torch.bfloat16, None], ms[torch.bfloat16, "static"]
    better = "static" if growing / static > WORTH_SETTING else "null"
    record(
        f"{growing:.2f} ms per token of 16 rows, static {static:.2f}: set model.cache_implementation={better}",
        growing_ms=growing, static_ms=static,
    )  # fmt: skip
    assert found[torch.float32, "static"] == found[torch.float32, None]


def cut_to_memory(shape: dict[str, Any]) -> dict[str, Any]:
    """The model's config with as many layers as fit the GPU's memory."""
    sizes = [count_parameters({**shape, "num_hidden_layers": n}) for n in (1, 2)]
    room = PART_OF_MEMORY * torch.cuda.get_device_properties(0).total_memory / BYTES
    layers = max(1, int((room - sizes[0]) / (sizes[1] - sizes[0])) + 1)
    return {**shape, "num_hidden_layers": min(shape["num_hidden_layers"], layers)}


def count_parameters(settings: dict[str, Any]) -> int:
    return sum(p.numel() for p in build(settings, dtype=torch.bfloat16, attention="sdpa", device="meta").parameters())


class Share(float):
    """A fraction, shown as a percentage."""


def summarize(result: dict[str, Any], peak: float) -> dict[str, Any]:
    """Figures of the timed updates.

    MFU counts useful tokens only (`compare.count_useful_flops`).
    """
    rows, pairs = result["rows"], result["pairs"]
    useful_rate = sum(row["useful"] for row in rows) / sum(row["seconds"] for row in rows)
    return {
        "pairs/s": pairs / median(row["seconds"] for row in rows),
        "MFU": Share(useful_rate / peak),
        "GiB": result["memory_gb"] * 1e9 / 2**30,
        "tokens/pair": sum(row["fed"] for row in rows) / len(rows) / pairs,
        "losses": [row["loss"] for row in rows],
    }


def summarize_profile(result: dict[str, Any]) -> dict[str, Share]:
    """Shares of the phases in an update, and of kinds of kernels."""
    phases, kernels = result["phases"], result["kernels"]
    busy = sum(kernels["by kind"].values())
    shares = {phase: Share(seconds / result["seconds"]) for phase, seconds in phases.items()}
    shares["optimizer"] = Share(shares["clip"] + shares["optimizer"])
    kinds = {kind: Share(seconds / busy) for kind, seconds in kernels["by kind"].items()}
    return {"attention": Share(0), "products": Share(0), **shares, **kinds, "optimizer": shares["optimizer"],
            "idle": Share(max(0.0, 1 - busy / kernels["seconds"]))}  # fmt: skip
