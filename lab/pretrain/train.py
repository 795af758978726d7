"""Pretrains one reference model with transformers' Trainer: checkpoints, exact resume, a loss log."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from kvbench.harness.core.device import cores, device_name
from kvbench.lab.pretrain import sigma_reparam, text, tokenizer
from kvbench.lab.pretrain.card import CURVE_NAME, card, curve
from kvbench.lab.pretrain.config import PretrainConfig, Training
from kvbench.lab.pretrain.held_out import HeldOut
from kvbench.lab.pretrain.new_model import new_model
from kvbench.lab.pretrain.ortho_adam import OrthoAdam
from kvbench.lab.pretrain.samples import READING, TrainingSamples, kinds_of

Tell = Callable[[str], None]
_LOG_SAMPLES, _CARD_SAMPLES = 8, 96  # held out, of a kind
_STEPS_PER_FLUSH = 10
_MOST_WORKERS = 12  # that draw samples while a GPU learns; on a CPU they would take its cores


class _Trainer(Trainer):
    """Reads the samples in order and keeps every step's loss."""

    losses: list[tuple[int, Tensor]]

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Matrices alone: norms, sink logits and gains don't decay."""
        vectors = {name for name, x in model.named_parameters() if x.ndim < 2}
        return [name for name in super().get_decay_parameter_names(model) if name not in vectors]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append((self.state.global_step + 1, loss.detach()))
        return loss

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        """Mean negative log-likelihood, weighted."""
        ids, weights = inputs["input_ids"].flatten(0, 1), inputs["weights"].flatten(0, 1)[:, 1:].flatten()
        predicting = torch.arange(ids.shape[1] - 1, device=ids.device)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=predicting).logits
        nll = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        return (nll * weights).sum() / weights.sum()


class _Log(TrainerCallback):
    """Writes one line of JSON per step: step, tokens, loss, learning rate, and at intervals what held-out samples show."""

    def __init__(
        self, path: Path, config: PretrainConfig, losses: list[tuple[int, Tensor]], held_out: HeldOut, tell: Tell
    ) -> None:
        self._path, self._config, self._losses, self._held_out, self._tell = path, config, losses, held_out, tell
        self._rows: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Drop the lines of steps after the checkpoint."""
        kept = [x for x in (self._path.read_text().splitlines() if self._path.exists() else []) if _step(x) <= state.global_step]
        self._path.write_text("".join(f"{x}\n" for x in kept))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, lr_scheduler: Any = None, **_: Any) -> None:
        training, step = self._config.training, state.global_step
        row: dict[str, Any] = {"step": step, "tokens": step * training.batch * training.sample, "loss": self._losses[-1][1]}
        row["learning_rate"] = lr_scheduler.get_last_lr()[0]
        if step % training.probe_every == 0 or step == state.max_steps:
            row |= self._measured(getattr(model, "_orig_mod", model))
        self._rows.append(row)
        if step % _STEPS_PER_FLUSH == 0 or step == state.max_steps:
            right = "".join(f", {name} {share:.0%}" for name, share in row.get("right", {}).items())
            self._tell(f"step {step:,} of {state.max_steps:,}: loss {float(row['loss']):.3f}{right}")
            self._write()

    def _measured(self, model: Any) -> dict[str, Any]:
        """Attention to the first token, and the share of answers that are right, by kind."""
        shares, answers = self._held_out.attention_to_first(model), self._held_out.answers(model)
        row: dict[str, Any] = {"attention_to_first": {"largest": float(shares.max()), "mean": float(shares.mean())}}
        sums = {kind: [sum(x) for x in zip(*samples, strict=True)] for kind, samples in answers.items()}
        return row | ({"right": {kind: round(right / count, 4) for kind, (right, count) in sums.items()}} if answers else {})

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the log, so that it covers every step of the checkpoint."""
        self._write()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the last steps."""
        self._write()

    def _write(self) -> None:
        for row in self._rows:
            row["loss"] = float(row["loss"])
        with self._path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in self._rows)
        self._rows = []
        self._losses[:] = self._losses[-1:]


def _step(line: str) -> int:
    return int(json.loads(line)["step"])


def pretrain(
    config: PretrainConfig,
    out: Path,
    data: Path | None,
    device: torch.device,
    tell: Callable[[str], None],
    steps: int | None = None,
) -> Path:
    """Train a model, or resume from the checkpoint in `out`. Returns the model's directory.

    `out` gets checkpoints, text, log (`log.jsonl`), models that the recipe keeps on the way (`models/`) and, at the end,
    `model/`. The books come from the directory `data`, or from the hub. `tell` is called with progress messages. Training stops
    after `steps`, as if killed; the learning-rate schedule stays that of the whole run.

    Raises:
        UserError: the books are not available.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # `tell` says how far it is
    out.mkdir(parents=True, exist_ok=True)
    training = config.training
    if config.words:
        tokens = tokenizer.of_words(config.words)
    else:
        texts = partial(text.for_tokenizer, config.text, config.seed, data)
        tokens = tokenizer.stored(out / "tokenizer.json", texts, config.shape)
    wrapped = tokenizer.wrapped(tokens, config.sinks)
    tell(f"{config.steps:,} steps of {training.batch * training.sample:,} tokens; making the text")
    plain = tokenizer.wrapped(tokens, 0)
    kinds = kinds_of(config, config.seed)
    counts = [sum(kind in READING for kind in kinds), _LOG_SAMPLES, _CARD_SAMPLES]
    ends = training.sample * np.cumsum(counts) * (not config.words)
    ids = np.zeros(0, np.uint16)
    if not config.words:
        ids = text.token_file(out / "text.u16", plain, text.pieces(config.text, config.seed, data), int(ends[-1]))  # type: ignore[no-untyped-call]
    samples = TrainingSamples(config, kinds, ids[: ends[0]], plain, config.seed)
    for_log = HeldOut(config, ids[ends[0] : ends[1]], _LOG_SAMPLES, plain, config.seed + 1)
    for_card = HeldOut(config, ids[ends[1] :], _CARD_SAMPLES, plain, config.seed + 2)
    trainer = _trainer(config, new_model(config), out, device, samples)
    trainer.losses = []
    trainer.add_callback(_Log(out / "log.jsonl", config, trainer.losses, for_log, tell))
    trainer.add_callback(_Keep(config, out / "models", wrapped))
    if steps is not None:
        trainer.add_callback(_StopAfter(steps))
    checkpoints = sorted(out.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    trainer.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
    if trainer.state.global_step >= config.steps:
        wrapped.save_pretrained(out / "model")
        trained = getattr(trainer.model, "_orig_mod", trainer.model)  # of torch.compile
        _save_model(config, trained, for_card, out, device)
    return out / "model"


def _save_model(config: PretrainConfig, model: Any, exam: HeldOut, out: Path, device: torch.device) -> None:
    """Write weights, training curve and model card."""
    answers, unbroken = exam.answers(model), exam.unbroken(model)
    model = sigma_reparam.plain(model).half()  # float16 halves the size
    model.save_pretrained(out / "model")
    about = {"device": device_name(device), "threads": torch.get_num_threads(), "torch": torch.__version__}
    about["transformers"] = version("transformers")
    parameters = sum(p.numel() for p in model.parameters())
    (out / "model" / CURVE_NAME).write_text(curve(out / "log.jsonl"), encoding="utf-8")
    (out / "model" / "README.md").write_text(
        card(config, out / "log.jsonl", parameters, answers, unbroken, about), encoding="utf-8"
    )


class _Keep(TrainerCallback):
    """Keeps the model at some steps, each in a folder that can be measured like any model's."""

    def __init__(self, config: PretrainConfig, folder: Path, tokenizer: Any) -> None:
        self._config, self._folder, self._tokenizer = config, folder, tokenizer

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 0:
            self._keep(0, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._keep(state.global_step, model)

    def _keep(self, step: int, model: Any) -> None:
        if self._config.is_kept(step):
            folder = self._folder / f"{self._config.name}-step-{step:06d}"  # records keep this name
            self._tokenizer.save_pretrained(folder)
            sigma_reparam.plain(getattr(model, "_orig_mod", model)).half().save_pretrained(folder)


class _StopAfter(TrainerCallback):
    """Stops training early, with a checkpoint."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= self._steps:
            control.should_save = control.should_training_stop = True


def _schedule(training: Training, steps: int) -> dict[str, Any]:
    """Arguments of the Trainer."""
    if training.schedule == "cosine":
        return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.05}}
    if training.schedule == "linear":
        return {"lr_scheduler_type": "linear"}
    decay = {"num_decay_steps": max(1, round(training.decay * steps)), "min_lr_ratio": 0.1}
    return {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": decay}


def _optimizer(config: PretrainConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """An optimiser that the Trainer doesn't have, and its arguments; None for its own AdamW."""
    training = config.training
    if training.optimizer == "adamw":
        return None
    if training.optimizer == "sgd":
        return torch.optim.SGD, {"lr": training.learning_rate, "momentum": 0.9}
    return OrthoAdam, {"lr": training.learning_rate, "betas": (0.9, training.beta2), "seed": config.seed}


def _workers(device: torch.device) -> int:
    """Return the number of processes that draw samples; 0: the training process draws them."""
    return 0 if device.type == "cpu" else min(_MOST_WORKERS, cores())


def _trainer(
    config: PretrainConfig, model: PreTrainedModel, out: Path, device: torch.device, samples: TrainingSamples
) -> _Trainer:
    training, steps = config.training, config.steps
    workers = _workers(device)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=training.batch,
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        adam_beta2=training.beta2,
        max_grad_norm=1.0,
        warmup_steps=round(training.warmup * steps),
        **_schedule(training, steps),
        save_steps=training.checkpoint_every,
        save_total_limit=1,
        logging_strategy="no",
        report_to=[],
        seed=config.seed,
        data_seed=config.seed,
        bf16=training.dtype == "bfloat16",
        use_cpu=device.type == "cpu",
        torch_compile=training.compile,
        dataloader_num_workers=workers,
        dataloader_prefetch_factor=4 if workers else None,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = _Trainer(model=model, args=arguments, train_dataset=samples, optimizer_cls_and_kwargs=_optimizer(config))
    trainer.remove_callback(PrinterCallback)
    return trainer
