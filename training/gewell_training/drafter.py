"""Trains nano's drafter on the states, keys and values of the trained nano, which does not change.

PYTHONPATH=.:training python -m gewell_training.drafter OUT --seconds 95
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from gewell.config import LayerConfig, LayerKind, ModelConfig
from gewell_training import nano
from gewell_training.loading import Batch, TrainingBatches
from gewell_training.optim import Optimizer
from gewell_training.train import TOKENIZER, lr_factor
from gewell_training.twin import MLP, Attend, Linear, Masks, RMSNorm, Rope, Twin, attend_dense, dense_masks

NUM_STEPS = 3  # drafts in a round
KV = dict[LayerKind, tuple[Tensor, Tensor]]


class QueryAttention(nn.Module):
    def __init__(self, layer: LayerConfig, config: ModelConfig) -> None:
        super().__init__()
        self.num_q_heads, self.head_dim = layer.num_q_heads, layer.head_dim
        self.q_proj = Linear(layer.num_q_heads * layer.head_dim, config.hidden_size)
        self.o_proj = Linear(config.hidden_size, layer.num_q_heads * layer.head_dim)
        self.q_norm = RMSNorm(layer.head_dim, config.rms_norm_eps, layer.head_dim**-0.25)

    def forward(self, x: Tensor, rope: Rope, k: Tensor, v: Tensor, mask: object, attend: Attend) -> Tensor:
        batch, length, _ = x.shape
        q = rope.turn(self.q_norm(self.q_proj(x).view(batch, length, self.num_q_heads, self.head_dim)))
        out = attend(q.transpose(1, 2), k, v, mask)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class DrafterLayer(nn.Module):
    def __init__(self, layer: LayerConfig, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.kind = layer.kind
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps, 0.25)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps, 0.25)
        self.self_attn = QueryAttention(layer, config)
        self.mlp = MLP(hidden, layer.intermediate_size)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, rope: Rope, k: Tensor, v: Tensor, mask: object, attend: Attend) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rope, k, v, mask, attend))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar.to(x.dtype)


class DrafterTwin(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.drafter is not None
        self.config = config
        backbone = config.drafter.backbone_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=config.hidden_size**-0.5)
        self.pre_projection = Linear(config.hidden_size, 2 * backbone)
        self.post_projection = Linear(backbone, config.hidden_size)
        self.layers = nn.ModuleList(DrafterLayer(layer, config) for layer in config.layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def step(
        self, words: Tensor, state: Tensor, kv: KV, ropes: dict[LayerKind, Rope], masks: Masks, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """words (the target's scaled embedding of the newest token), state [B, T, backbone] -> hidden, next state.

        Query t has verified tokens up to t and token t + 1 as the newest one: it may see what token t sees, at the
        rotary position of t + 1, in all steps of the round.
        """
        x = self.pre_projection(torch.cat((words, state), dim=-1))
        for layer in self.layers:
            assert isinstance(layer, DrafterLayer)
            x = layer(x, ropes[layer.kind], *kv[layer.kind], masks.of(layer.kind), attend)
        hidden = self.norm(x)
        return hidden, self.post_projection(hidden)


def draft_losses(
    target: Twin, drafter: DrafterTwin, batch: Batch, masks: Masks, attend: Attend, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss over all steps; right [NUM_STEPS, M] and usable [NUM_STEPS, M]: step s predicts token t + 2 + s."""
    with torch.no_grad():
        state, kv = target.run(batch.ids, batch.positions, masks, attend, dtype)
        limit = target.config.max_position_embeddings - 1
        ropes = target.turns((batch.positions + 1).clamp(max=limit))
        flat_ids = batch.ids.flatten()
        is_learned = torch.zeros(len(flat_ids), dtype=torch.bool, device=flat_ids.device)
        is_learned[batch.rows[batch.weights > 0]] = True
        usable = batch.weights > 0
    loss = torch.zeros((), device=flat_ids.device)
    all_right, all_usable = [], []
    for s in range(NUM_STEPS):
        with torch.no_grad():
            words = target.embed(batch.ids.roll(-1 - s, dims=1), dtype)
        hidden, state = drafter.step(words, state, kv, ropes, masks, attend)
        entry = (batch.rows + 1 + s).clamp(max=len(flat_ids) - 2)  # the place that speaks of token t + 2 + s
        usable = usable & is_learned[entry]
        logits = F.linear(hidden.flatten(0, 1)[batch.rows].float(), drafter.embed_tokens.weight)
        targets = flat_ids[entry + 1]
        losses = F.cross_entropy(logits, targets, reduction="none")
        loss = loss + (losses * usable).sum() / usable.sum().clamp(min=1)
        all_right.append((logits.argmax(dim=-1) == targets) & usable)
        all_usable.append(usable)
    return loss / NUM_STEPS, torch.stack(all_right), torch.stack(all_usable)


def acceptance(right: Tensor, usable: Tensor) -> float:
    """Mean share of a round's drafts that a greedy target would accept, over rounds that have all drafts."""
    whole = usable[-1]
    runs = right[:, whole].cumprod(dim=0)
    return float(runs.sum() / max(1, runs.numel()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the drafter's checkpoint and its log")
    parser.add_argument("--model", type=Path, default=TOKENIZER.parent, help="the trained model's folder")
    parser.add_argument("--seconds", type=float, default=95, help="wall clock, start and end included")
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=nano.ROW_TOKENS)
    parser.add_argument("--num-workers", type=int, default=11)
    parser.add_argument("--longest", type=int, default=3000, help="tokens of the longest record text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=N", help="as given to the model's run")
    a = parser.parse_args()
    started = time.perf_counter()
    changes = {name: int(value) for name, value in (item.split("=") for item in a.set)}
    device = torch.device(a.device)
    is_gpu = device.type == "cuda"
    batches = TrainingBatches(
        TOKENIZER,
        num_workers=a.num_workers,
        batch_rows=a.batch_rows,
        row_tokens=a.row_tokens,
        num_slots=3 * a.batch_rows * a.row_tokens // 8,
        seed=77,
        longest=a.longest,
        pin=is_gpu,
    )
    try:
        _train(a, batches, changes, device, started)
    finally:
        batches.close()


def _train(
    a: argparse.Namespace, batches: TrainingBatches, changes: dict[str, int], device: torch.device, started: float
) -> None:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    target = Twin(nano.model_config(**changes)).to(device).requires_grad_(False)
    stored = load_file(str(a.model / "model.safetensors"))
    target.load_state_dict({name.removeprefix(nano.PREFIX): tensor for name, tensor in stored.items()})
    drafter = DrafterTwin(nano.drafter_config(**changes)).to(device)
    optimizer = Optimizer(drafter)
    attend: Attend = attend_dense
    if is_gpu:
        from gewell_training.flex import FlexMasks, compiled_attend_flex

        attend = compiled_attend_flex()
        flex_masks = FlexMasks(a.batch_rows, a.row_tokens, target.config.sliding_window, device, compile=False)
    log: list[dict[str, float]] = []
    clock, trained = None, 0.0
    planned = float("inf")
    rights: list[float] = []
    for step, cpu_batch in enumerate(batches, start=1):
        batch = cpu_batch.to(device)
        masks = flex_masks(batch.document) if is_gpu else dense_masks(batch.document, target.config.sliding_window)
        loss, right, usable = draft_losses(target, drafter, batch, masks, attend, dtype)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no type there
        optimizer.step(lr_factor(trained / planned, step))
        loss = loss.detach()
        now = time.perf_counter()
        if clock is None:
            float(loss)
            now = time.perf_counter()
            planned = a.seconds - (now - started) - 4
            print(f"first step done after {now - started:.0f} s", flush=True)
        else:
            trained += now - clock
        clock = now
        if step % 20 == 0:
            rights.append(acceptance(right, usable))
            log.append(
                {
                    "step": step,
                    "seconds": round(trained, 1),
                    "loss": round(float(loss), 4),
                    "acceptance": round(rights[-1], 4),
                }
            )
            print(log[-1], flush=True)
        if trained >= planned:
            break
    nano.export_drafter(drafter.state_dict(), a.out)
    (a.out / "log.json").write_text(json.dumps(log) + "\n")
    print(f"acceptance of {NUM_STEPS} drafts, last batches: {sum(rights[-5:]) / max(1, len(rights[-5:])):.3f}")


if __name__ == "__main__":
    main()
