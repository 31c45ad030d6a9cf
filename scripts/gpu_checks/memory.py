"""Check 7: memory predicted by `dry_run`; memory released with the reference; whether all weights can still be
gathered."""

from __future__ import annotations

import re
import weakref

import torch

from scripts.gpu_checks.common import TINY, CheckFailed, Outcome, Run, Setting, few_words, train_here
from scripts.gpu_checks.models import write_model
from scripts.gpu_checks.table import GIVEN_BACK, PREDICTION

COMMON = ("loss=dpo", "loss.beta=0.1", "datasets=[hh]", "n_eval_examples=4", "eval_batch_size=4",
          "do_first_eval=false", "sample_during_eval=false", "max_prompt_length=64", "model.reference_dtype=float32",
          "n_epochs=null", "debug=true")  # fmt: skip


def check(setting: Setting) -> Outcome:
    sizes = setting.pick((12, 1024, 16), (12, 1024, 16), (4, 512, 8))
    large = (f"model.name_or_path={write_model(setting, 'llama', *sizes)}", "model.random_init=true")
    common = (*COMMON, f"dataset_sources.hh={few_words(setting, 40)}")
    length, batch, n = setting.pick((512, 16, 96), (512, 16, 96), (96, 4, 12))
    whole = (*common, *large, f"max_length={length}", f"batch_size={batch}", f"n_examples={n}")
    dry, real = Run(setting, "dry", *whole, "dry_run=true"), Run(setting, "real", *whole)
    said = re.search(r"total +([\d.]+) GB", dry.done().text())
    if said is None:
        raise CheckFailed("the dry run printed no total")
    predicted, peak = float(said[1]), real.done().records(split="train")[-1]["memory/peak_gb"]

    small = (*common, *setting.pick(large, large, (f"model.name_or_path={TINY}",)), "max_length=96")
    given_back = {base: freed(setting, base, *small) for base in ("BasicTrainer", "FSDPTrainer")}
    fits = fits_after_updates(setting, *small)
    off, allowed, least = predicted / peak - 1, PREDICTION[setting.device], min(given_back.values())
    figure = (
        f"predicted {predicted:.2f} GB, measured {peak:.2f}: {off:+.0%} (of {allowed:.0%}); freeing the reference "
        f"released {least:.0%} of its bytes (at least {GIVEN_BACK:.0%}); gathered weights "
        f"{'fit' if fits else 'do not fit'} after 20 updates"
    )
    passed = abs(off) <= allowed and least >= GIVEN_BACK and fits
    details = {"predicted_gb": predicted, "measured_gb": peak, "given_back": given_back, "fits": fits}
    return Outcome(passed, figure, details)


def freed(setting: Setting, base: str, *overrides: str) -> float:
    """The share of the reference's bytes that `cache_reference_logps=all` releases once all pairs are scored."""
    found: list[float] = []

    def watch(trainer: type) -> type:
        class Watched(trainer):
            def check_and_score_reference(self) -> None:
                held = [local(parameter) for parameter in self.reference_model.parameters()]
                size = sum(tensor.nbytes for tensor in held)
                held = [(weakref.ref(tensor), tensor.nbytes) for tensor in held]
                before = allocated(setting)
                super().check_and_score_reference()
                alive = sum(n for tensor, n in held if tensor() is not None)
                found.append((before - allocated(setting)) / size if setting.gpu else 1 - alive / size)

        return Watched

    small = ("batch_size=4", "n_examples=8", "cache_reference_logps=all")
    train_here(setting, f"freed-{base}", base, watch, *overrides, *small)
    return found[0]


def local(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that holds this process's part of a parameter."""
    return getattr(parameter, "_local_tensor", parameter)


def allocated(setting: Setting) -> int:
    return torch.cuda.memory_allocated() if setting.gpu else 0


def fits_after_updates(setting: Setting, *overrides: str) -> bool:
    """Whether FSDP finds room to gather all weights after 20 updates, with the allocator's cache full."""
    from dpo.parallel.sharding import gathered_weights

    found: list[bool] = []

    def watch(trainer: type) -> type:
        class Watched(trainer):
            def train(self) -> None:
                super().train()
                if setting.gpu:
                    fill_cache(sum(p.numel() * p.element_size() for p in self.policy.parameters()))
                with gathered_weights(self.policy) as fit:
                    found.append(fit)

        return Watched

    train_here(setting, "fits", "FSDPTrainer", watch, *overrides, "batch_size=2", "n_examples=40")
    return found[0]


def fill_cache(spare: int) -> None:
    """Fill the allocator's cache until only `spare` bytes of the GPU are free."""
    size = torch.cuda.mem_get_info()[0] - spare
    while size > 0:
        try:
            torch.empty(size, dtype=torch.uint8, device="cuda")  # freed immediately, and cached by the allocator
            return
        except torch.OutOfMemoryError:
            size -= 2**28
