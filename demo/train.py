"""Trains the demo model from scratch on the CPU and writes the checkpoint that is published in demo/model.

    python -m demo.train --steps 5000 --minutes 30 --threads 1 --out demo/work/model

The run ends after ``--steps`` or ``--minutes``, whichever comes first, and the learning rate follows whichever is
further along. A run that ends by its steps, and whose steps were ahead of the clock all the way, sees the same stories
in the same order with the same learning rates wherever it runs. Ctrl-C leaves the last whole checkpoint.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import OlmoeConfig, OlmoeForCausalLM

from demo.checkpoint import save_checkpoint
from demo.load_balance import expert_load, load_balancing_loss
from demo.story_batches import IGNORED, StoryBatch, story_batches
from demo.train_tokenizer import BEGIN_ID, END_ID, PAD_ID, VOCABULARY_SIZE, train_tokenizer

TRAINING_SEED, VALIDATION_SEED = 2, 3
"""Series of stories; the tokeniser is trained on another one (demo/train_tokenizer.py)."""

VALIDATION_BATCHES = 32
STORIES_PER_BATCH = 8
ADAMW_LEARNING_RATE = 1.5e-3
MUON_LEARNING_RATE = 3e-3
WARM_UP_STEPS = 60
CONSTANT_SHARE = 0.5
"""Share of the run before the learning rate decays."""
LAST_LEARNING_RATE_SHARE = 0.02
LOAD_BALANCING_WEIGHT = 0.01
STEPS_PER_REPORT = 50
STEPS_PER_CHECKPOINT = 250


def demo_config() -> OlmoeConfig:
    """7.75 million parameters, 81 percent of them in 4 layers of 16 experts; a token goes through 2 in each layer."""
    return OlmoeConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.04,
        router_aux_loss_coef=LOAD_BALANCING_WEIGHT,
        bos_token_id=BEGIN_ID,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )


def new_model(config: OlmoeConfig) -> OlmoeForCausalLM:
    model = OlmoeForCausalLM(config)
    # grouped_mm is twice as fast as the eager loop here. The layers' outputs add up, so they begin smaller (GPT-2).
    model.set_experts_implementation("grouped_mm")
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj")):
            parameter.data.mul_(1 / math.sqrt(2 * config.num_hidden_layers))
    return model


def learning_rate_share(step: int, progress: float) -> float:
    """Warm up by steps, stay at 1, then decay linearly to the end; ``progress`` goes from 0 to 1."""
    decay = min(1.0, (1 - progress) / (1 - CONSTANT_SHARE))
    return min(1.0, (step + 1) / WARM_UP_STEPS) * max(LAST_LEARNING_RATE_SHARE, decay)


def new_optimizers(model: OlmoeForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the attention matrices, AdamW for the rest.

    A story needs its names copied from far back, and Muon brings the attention to do so an order of magnitude sooner
    than AdamW alone (figures in the README).
    """
    named = dict(model.named_parameters())
    attention = {name for name, parameter in named.items() if ".self_attn." in name and parameter.dim() == 2}
    rest = [parameter for name, parameter in named.items() if name not in attention]
    decayed = [parameter for parameter in rest if parameter.dim() > 1]
    norms = [parameter for parameter in rest if parameter.dim() == 1]
    return [
        torch.optim.Muon(
            [named[name] for name in sorted(attention)],
            lr=MUON_LEARNING_RATE,
            weight_decay=0.01,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}],
            lr=ADAMW_LEARNING_RATE,
            betas=(0.9, 0.95),
            fused=True,
        ),
    ]


def losses(model: OlmoeForCausalLM, batch: StoryBatch) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Cross-entropy (nats a token), load-balancing loss, and the load of each layer's experts."""
    with torch.autocast("cpu", torch.bfloat16):
        output = model(input_ids=batch.inputs, output_router_logits=True, use_cache=False)
    cross_entropy = F.cross_entropy(output.logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)
    real = batch.labels.flatten() != IGNORED
    experts_per_token = model.config.num_experts_per_tok
    balance = load_balancing_loss(output.router_logits, real, experts_per_token)
    return cross_entropy, balance, [expert_load(logits[real], experts_per_token) for logits in output.router_logits]


@dataclass(frozen=True)
class Validation:
    """On stories that are in no training series. ``entropy`` is that of the grammar on the same stories."""

    loss_nats_per_token: float
    entropy_nats_per_token: float
    largest_load_over_mean: float
    smallest_load_over_mean: float


@torch.no_grad()
def validate(model: OlmoeForCausalLM, batches: list[StoryBatch]) -> Validation:
    model.eval()
    labels, loss, load = 0, 0.0, torch.zeros(model.config.num_hidden_layers, model.config.num_experts)
    for batch in batches:
        cross_entropy, _, layer_loads = losses(model, batch)
        labels += batch.label_count
        loss += cross_entropy.item() * batch.label_count
        load += torch.stack(layer_loads) * batch.label_count
    model.train()
    relative = load / load.mean(dim=1, keepdim=True)
    entropy = sum(batch.nats for batch in batches) / labels
    return Validation(loss / labels, entropy, relative.max().item(), relative.min().item())


def talk(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def train(steps: int, minutes: float, seed: int, out: Path) -> None:
    torch.manual_seed(seed)
    tokenizer = train_tokenizer()
    model = new_model(demo_config()).train()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    talk(f"{parameters:,} parameters, {steps} steps in {minutes:g} minutes at most")
    optimizers = new_optimizers(model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peak_learning_rates = [group["lr"] for group in groups]
    validation_batches = list(islice(story_batches(VALIDATION_SEED, tokenizer, STORIES_PER_BATCH), VALIDATION_BATCHES))

    begin = time.monotonic()
    step = tokens = 0
    recent: list[float] = []

    def checkpoint(ended_by: str | None) -> None:
        validation = validate(model, validation_batches)
        talk(
            f"step {step}: validation loss {validation.loss_nats_per_token:.4f} nats a token (grammar: "
            f"{validation.entropy_nats_per_token:.4f}), expert load over mean "
            f"{validation.smallest_load_over_mean:.2f} to {validation.largest_load_over_mean:.2f}"
        )
        record: dict[str, object] = {
            "parameters": parameters,
            "steps": step,
            "stories": step * STORIES_PER_BATCH,
            "tokens": tokens,
            "seconds": round(time.monotonic() - begin),
            "cpu_seconds": round(time.process_time()),
            "threads": torch.get_num_threads(),
            "seed": seed,
            "ended_by": ended_by or "not ended",
            "validation": asdict(validation),
            "torch": torch.__version__,
        }
        save_checkpoint(model, tokenizer, record, out)

    for batch in story_batches(TRAINING_SEED, tokenizer, STORIES_PER_BATCH):
        by_steps, by_time = step / steps, (time.monotonic() - begin) / (60 * minutes)
        if by_steps >= 1 or by_time >= 1:
            checkpoint("steps" if by_steps >= 1 else "minutes")
            return
        if step and step % STEPS_PER_CHECKPOINT == 0:
            checkpoint(None)
        share = learning_rate_share(step, max(by_steps, by_time))
        for group, peak in zip(groups, peak_learning_rates, strict=True):
            group["lr"] = peak * share
        cross_entropy, balance, _ = losses(model, batch)
        (cross_entropy + LOAD_BALANCING_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + batch.label_count
        recent.append(cross_entropy.item())
        if step % STEPS_PER_REPORT == 0:
            seconds = time.monotonic() - begin
            talk(
                f"step {step}/{steps}, {tokens:,} tokens, {seconds / 60:.1f} min, {tokens / seconds:.0f} tokens/s, "
                f"loss {sum(recent) / len(recent):.4f}, balance {balance.item():.2f}"
            )
            recent.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000, help="steps of the run (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=30, help="time limit of the run (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo/work/model"), help="folder to write (default: %(default)s)"
    )
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    train(arguments.steps, arguments.minutes, arguments.seed, arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
