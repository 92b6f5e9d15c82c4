"""Trains gewell-nano for a given time, goes on where an earlier run stopped, and leaves everything in one folder.

    PYTHONPATH=.:training python -m gewell_training.train --out OUT --seconds 560 [--resume OUT]

The learning rate and the curriculum follow the share of the planned seconds that has been trained, over all runs.
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from gewell_training import nano
from gewell_training.loading import Batch, HeldOut, TrainingBatches
from gewell_training.optim import Optimizer
from gewell_training.packing import TASK_NAMES
from gewell_training.twin import Attend, Masks, Twin, attend_dense, dense_masks

TOKENIZER = Path(__file__).parents[2] / "gewell" / "shipped" / "gewell-nano" / "tokenizer.json"
STAGES = (160, 320, 640, 1280, 2560, 5120, 8192)  # tokens of the longest record text
STAGE_ACCURACY = 0.94  # of the tokens of record answers: four in nine are digits, which guessing gets right by a tenth
LAST_STAGE_AT = 0.55  # share of the planned time by which the last stage begins, whatever the accuracy
MIN_TOKENS_PER_S, MIN_RECORDS_ACCURACY = 200_000, 0.65
RESERVED_SECONDS = 25  # of a run that ends the training: for its evaluations
FILE_BYTES = 16_500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    out: Path
    tokenizer: Path
    seconds: float
    planned_seconds: float | None  # None: this run ends the training
    resume: Path | None
    batch_rows: int
    row_tokens: int
    num_workers: int
    num_slots: int
    seed: int
    muon_lr: float
    adam_lr: float
    eval_every_s: float
    save_every_s: float
    num_held_out: int
    log_every: int
    device: torch.device
    changes: dict[str, int]


@dataclass(slots=True, kw_only=True)
class Progress:
    """What a later run must know besides the weights."""

    num_steps: int = 0
    num_tokens: int = 0
    trained_seconds: float = 0.0
    stage: int = 0
    best_score: float = 0.0
    log: list[dict[str, object]] = dataclasses.field(default_factory=list)


def lr_factor(share: float, step: int, *, num_warmup: int = 100, decay_from: float = 0.45) -> float:
    """Warm up by steps, hold, then go down in a line to a fiftieth."""
    down = min(1.0, max(0.0, (share - decay_from) / (1 - decay_from)))
    return min(1.0, (step + 1) / num_warmup) * (1 - 0.98 * down)


class Trainer:
    def __init__(
        self, settings: Settings, progress: Progress, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.settings = s = settings
        self.clock, self.started = clock, clock()
        torch.manual_seed(s.seed)
        torch.set_float32_matmul_precision("high")
        self.config = nano.model_config(**s.changes)
        self.model = Twin(self.config).to(s.device)
        self.progress = progress
        self.planned_seconds = s.planned_seconds or math.inf
        if s.resume is not None:
            self.model.load_state_dict(read_state(s.resume, "last"))
            print(f"going on from step {progress.num_steps}, {progress.trained_seconds:.0f} s trained", flush=True)
        self.is_gpu = s.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32
        self.optimizer = Optimizer(self.model, muon_lr=s.muon_lr, adam_lr=s.adam_lr)
        self.attend: Attend = attend_dense
        self.masks: Callable[[Tensor], Masks] = lambda document: dense_masks(document, self.config.sliding_window)
        self.head = self._head
        if self.is_gpu:
            from gewell_training.flex import FlexMasks, attend_flex

            self.attend = attend_flex
            self.masks = FlexMasks(s.batch_rows, s.row_tokens, self.config.sliding_window, s.device)
            self.head = torch.compile(self._head, dynamic=False)
            for layer in self.model.layers:
                layer.compile(dynamic=False)
        self.num_run_steps = 0
        self.right = torch.zeros(len(TASK_NAMES), device=s.device)
        self.seen = torch.zeros(len(TASK_NAMES), device=s.device)

    @property
    def run_seconds(self) -> float:
        return self.clock() - self.started

    @property
    def share(self) -> float:
        return self.progress.trained_seconds / self.planned_seconds

    # --- one step ------------------------------------------------------------------------------------------------

    def _head(self, hidden: Tensor, batch_rows: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model.logits(hidden.flatten(0, 1)[batch_rows])
        losses = F.cross_entropy(logits, targets, reduction="none")
        return (losses * weights).sum() / weights.sum().clamp(min=1), (logits.argmax(dim=-1) == targets) & (weights > 0)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean loss, and for each slot whether the right token was the likeliest."""
        masks = self.masks(batch.document)
        hidden = self.model(batch.ids, batch.positions, masks, self.attend, self.dtype)
        loss, right = self.head(hidden, batch.rows, batch.targets, batch.weights)
        return loss, right

    def step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, right = self.forward(batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no type there
        factor = lr_factor(self.share, self.num_run_steps)
        norm = self.optimizer.step(factor)
        with torch.no_grad():
            self.right.index_add_(0, batch.labels, right.float())
            self.seen.index_add_(0, batch.labels, (batch.weights > 0).float())
        return loss.detach(), norm

    def evaluate(self, held_out: HeldOut) -> dict[str, float]:
        wrong = torch.zeros(len(held_out.test_of_group), device=self.settings.device)
        for batch in held_out.batches:
            moved = batch.to(self.settings.device)
            _, right = self.forward(moved)  # with gradients enabled: the same compiled code as in training
            wrong.index_add_(0, moved.labels, (~right).float() * moved.weights)
        return held_out.scores(wrong)

    # --- the run -------------------------------------------------------------------------------------------------

    def run(self, batches: TrainingBatches, held_out: HeldOut) -> None:
        s, p = self.settings, self.progress
        batches.longest = STAGES[p.stage]
        last_eval = last_save = last_log = self.run_seconds
        waited, eval_seconds, tokens_at_log, last_step = 0.0, 5.0, p.num_tokens, None
        stream = iter(batches)
        while self.run_seconds + eval_seconds + 5 < s.seconds and self.share < 1:
            began = self.clock()
            batch = next(stream)
            waited += self.clock() - began
            loss, norm = self.step(batch.to(s.device))
            p.num_steps += 1
            self.num_run_steps += 1
            p.num_tokens += batch.num_tokens
            now = self.clock()
            if last_step is not None:  # compiling in the first step is no training
                p.trained_seconds += now - last_step
            else:
                float(loss)  # waits for the device
                now = self.clock()
                last_eval = last_save = last_log = self.run_seconds
                tokens_at_log = p.num_tokens
                if s.planned_seconds is None:
                    self.planned_seconds = p.trained_seconds + s.seconds - self.run_seconds - RESERVED_SECONDS
                used = torch.cuda.max_memory_allocated() / 1e9 if self.is_gpu else 0.0
                print(f"first step done after {self.run_seconds:.0f} s; {used:.1f} GB", flush=True)
            last_step = now
            if p.num_steps % s.log_every == 0:
                span, last_log = self.run_seconds - last_log, self.run_seconds
                speed = (p.num_tokens - tokens_at_log) / max(span, 1e-9)
                tokens_at_log = p.num_tokens
                self._log(float(loss), float(norm), speed, waited / max(span, 1e-9), batches)
                waited = 0.0
            if self.run_seconds - last_eval > s.eval_every_s:
                began = self.clock()
                self._evaluate_and_save(held_out)
                eval_seconds = max(2.0, 1.5 * (self.clock() - began))
                last_eval = last_save = last_log = self.run_seconds
                tokens_at_log, last_step = p.num_tokens, self.clock()
            elif self.run_seconds - last_save > s.save_every_s:
                self.save()
                last_save = self.run_seconds
        self._evaluate_and_save(held_out)

    def _log(self, loss: float, norm: float, speed: float, waiting: float, batches: TrainingBatches) -> None:
        p = self.progress
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss is {loss} at step {p.num_steps}; the last saved weights are still good")
        accuracy = (self.right / self.seen.clamp(min=1)).tolist()
        self.right.zero_()
        self.seen.zero_()
        by_task = {name: round(value, 4) for name, value in zip(TASK_NAMES, accuracy, strict=True)}
        entry: dict[str, object] = {
            "step": p.num_steps,
            "seconds": round(p.trained_seconds, 1),
            "tokens": p.num_tokens,
            "loss": round(loss, 4),
            "grad_norm": round(norm, 3),
            "lr_factor": round(lr_factor(self.share, self.num_run_steps), 4),
            "longest": batches.longest,
            "tokens_per_s": round(speed),
            "waiting": round(waiting, 3),
            "train_accuracy": by_task,
        }
        p.log.append(entry)
        short = " ".join(f"{name}={value:.2f}" for name, value in by_task.items())
        print(
            f"{p.num_steps} {p.trained_seconds:.0f}s loss {loss:.3f} {speed / 1e3:.0f}k tok/s wait {waiting:.2f} "
            f"ready {batches.num_ready} len {batches.longest} | {short}",
            flush=True,
        )
        self._give_up_early(speed, by_task["records"])
        forced = min(len(STAGES) - 1, int(self.share / LAST_STAGE_AT * (len(STAGES) - 1)))
        if p.stage < len(STAGES) - 1 and (by_task["records"] > STAGE_ACCURACY or p.stage < forced):
            p.stage += 1
            batches.longest = STAGES[p.stage]

    def _give_up_early(self, speed: float, accuracy: float) -> None:
        """A run that goes wrong ends while there is time for another one on a rented device."""
        trained = self.progress.trained_seconds
        if self.is_gpu and trained > 30 and speed < MIN_TOKENS_PER_S:
            raise RuntimeError(f"{speed:.0f} tokens/s; at least {MIN_TOKENS_PER_S} were expected")
        if self.is_gpu and trained > 100 and accuracy < MIN_RECORDS_ACCURACY:
            raise RuntimeError(f"records are not learned after {trained:.0f} s: accuracy {accuracy:.2f}")

    def _evaluate_and_save(self, held_out: HeldOut) -> None:
        scores = self.evaluate(held_out)
        mean = sum(scores.values()) / len(scores)
        p = self.progress
        p.log.append(
            {
                "step": p.num_steps,
                "seconds": round(p.trained_seconds, 1),
                "tokens": p.num_tokens,
                **{"held_out": scores},
            }
        )
        print(f"held-out {mean:.4f} " + " ".join(f"{k}={v:.3f}" for k, v in scores.items()), flush=True)
        if mean >= p.best_score:
            p.best_score = mean
            state = {name: t.detach().to("cpu", torch.bfloat16) for name, t in self.model.state_dict().items()}
            self._write(state, "best")
        self.save()

    # --- files ---------------------------------------------------------------------------------------------------

    def save(self) -> None:
        state = {name: t.detach().to("cpu", copy=True) for name, t in self.model.state_dict().items()}
        self._write(state, "last")
        text = json.dumps(dataclasses.asdict(self.progress))
        (self.settings.out / "progress.json.new").write_text(text)
        (self.settings.out / "progress.json.new").replace(self.settings.out / "progress.json")

    def _write(self, state: dict[str, Tensor], name: str) -> None:
        """In files small enough to travel; each is replaced whole."""
        parts: list[dict[str, Tensor]] = [{}]
        size = 0
        for key, tensor in state.items():
            if size + tensor.nbytes > FILE_BYTES and parts[-1]:
                parts.append({})
                size = 0
            parts[-1][key] = tensor.contiguous()
            size += tensor.nbytes
        for i, part in enumerate(parts):
            new = self.settings.out / f"{name}-{i}.new"
            save_file(part, str(new))
            new.replace(self.settings.out / f"{name}-{i}.safetensors")


def read_state(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors that a run saved as `last` (float32) or `best` (bfloat16)."""
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob(f"{name}-*.safetensors")):
        state |= load_file(str(file))
    if not state:
        raise FileNotFoundError(f"{folder} holds no {name}-*.safetensors")
    return state


def held_out_sizes(num_samples: int, row_tokens: int) -> dict[str, tuple[str, int, int]]:
    sizes = {name: (name, 300, num_samples) for name in TASK_NAMES if name != "niah"}
    lengths = [n for n in (512, 1024, 2048, 4096, 8192) if n <= row_tokens]
    return sizes | {f"niah.{n}": ("niah", n, max(4, num_samples // 12)) for n in lengths}


def _settings() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--seconds", type=float, default=560, help="wall clock of this run, start and end included")
    parser.add_argument(
        "--planned-seconds", type=float, help="of training, in all runs together; left out: this run ends the training"
    )
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--batch-rows", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=nano.ROW_TOKENS)
    parser.add_argument("--num-workers", type=int, default=11)
    parser.add_argument("--slots-share", type=float, default=0.375, help="learned tokens in a batch, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=2e-3)
    parser.add_argument("--eval-every-s", type=float, default=45)
    parser.add_argument("--save-every-s", type=float, default=60)
    parser.add_argument("--num-held-out", type=int, default=200)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=N", help="changes to text_config")
    a = parser.parse_args()
    changes = {name: int(value) for name, value in (item.split("=") for item in a.set)}
    return Settings(
        out=a.out,
        tokenizer=a.tokenizer,
        seconds=a.seconds,
        planned_seconds=a.planned_seconds,
        resume=a.resume,
        batch_rows=a.batch_rows,
        row_tokens=a.row_tokens,
        num_workers=a.num_workers,
        num_slots=int(a.slots_share * a.batch_rows * a.row_tokens),
        seed=a.seed,
        muon_lr=a.muon_lr,
        adam_lr=a.adam_lr,
        eval_every_s=a.eval_every_s,
        save_every_s=a.save_every_s,
        num_held_out=a.num_held_out,
        log_every=a.log_every,
        device=torch.device(a.device),
        changes=changes,
    )


def main() -> None:
    settings = _settings()
    settings.out.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    if settings.resume is not None:
        progress = Progress(**json.loads((settings.resume / "progress.json").read_text()))
    seed = settings.seed + progress.num_steps  # a resumed run draws other samples
    batches = TrainingBatches(
        settings.tokenizer,
        num_workers=settings.num_workers,
        batch_rows=settings.batch_rows,
        row_tokens=settings.row_tokens,
        num_slots=settings.num_slots,
        seed=seed,
        longest=STAGES[progress.stage],
        pin=settings.device.type == "cuda",
    )
    try:
        trainer = Trainer(settings, progress)
        held_out = HeldOut.build(
            settings.tokenizer,
            held_out_sizes(settings.num_held_out, settings.row_tokens),
            batch_rows=settings.batch_rows,
            row_tokens=settings.row_tokens,
            num_slots=settings.num_slots,
        )
        print(f"ready after {trainer.run_seconds:.0f} s; {len(held_out.batches)} held-out batches", flush=True)
        trainer.run(batches, held_out)
    finally:
        batches.close()


if __name__ == "__main__":
    main()
