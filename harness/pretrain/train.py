"""Pretrains one reference model with transformers' Trainer: checkpoints, exact resume, a loss log."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from kvbench.harness.core.device import device_name
from kvbench.harness.engine.zero_sink import ZERO_SINK
from kvbench.harness.pretrain import curve, text, tokenizer
from kvbench.harness.pretrain.card import card
from kvbench.harness.pretrain.config import PretrainConfig
from kvbench.harness.pretrain.probe import attention_to_first

Tell = Callable[[str], None]
_PROBE_SAMPLES = 8
_STEPS_PER_FLUSH = 10


class Samples(Dataset[dict[str, Tensor]]):
    """Shuffled pieces of one stream of tokens, each after the model's sinks. Every model is scored on the same tokens."""

    def __init__(self, ids: NDArray[np.uint16], length: int, sinks: int, seed: int) -> None:
        """Cut the stream into samples.

        Args:
            ids: the text. [N].
            length: tokens of text in a sample.
            sinks: sink tokens before each sample.
            seed: of the samples' order.
        """
        self._ids, self._length, self._sinks = ids, length, sinks
        self._order = np.random.default_rng(seed).permutation(len(ids) // length)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        index = int(self._order[place])
        part = torch.from_numpy(self._ids[index * self._length : (index + 1) * self._length].astype(np.int64))
        labels = part.clone()
        labels[0] = -100  # only a model with sinks could predict it
        sinks = torch.arange(self._sinks)  # their ids are 0, 1, ...
        return {"input_ids": torch.cat([sinks, part]), "labels": torch.cat([torch.full_like(sinks, -100), labels])}


class _Trainer(Trainer):
    """Reads the samples in order and keeps every step's loss."""

    losses: list[tuple[int, Tensor]]

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append((self.state.global_step + 1, loss.detach()))
        return loss


class _Log(TrainerCallback):
    """Writes one line of JSON per step: step, tokens, loss, learning rate, and at intervals attention to the first token."""

    def __init__(
        self, path: Path, config: PretrainConfig, losses: list[tuple[int, Tensor]], samples: Tensor, tell: Tell
    ) -> None:  # fmt: skip
        self._path, self._config, self._losses, self._samples, self._tell = path, config, losses, samples, tell
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
            shares = attention_to_first(getattr(model, "_orig_mod", model), self._samples)
            row["attention_to_first"] = {"largest": float(shares.max()), "mean": float(shares.mean())}
        self._rows.append(row)
        if step % _STEPS_PER_FLUSH == 0 or step == state.max_steps:
            self._tell(f"step {step:,} of {state.max_steps:,}: loss {float(row['loss']):.3f}")
            self._write()

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


def new_model(config: PretrainConfig) -> LlamaForCausalLM:
    """The untrained model. Its weights don't depend on the number of sinks or the kind of softmax."""
    shape = config.shape
    torch.manual_seed(config.seed)
    attention: dict[str, Any] = {"attn_implementation": ZERO_SINK if config.zero_sink else "sdpa"}
    attention |= {"zero_sink": True} if config.zero_sink else {}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            max_position_embeddings=config.training.sample + config.sinks, tie_word_embeddings=True,
            bos_token_id=0 if config.sinks else None, eos_token_id=None, **attention,
        )
    )  # fmt: skip


def pretrain(
    config: PretrainConfig,
    out: Path,
    data: Path | None,
    device: torch.device,
    tell: Callable[[str], None],
    steps: int | None = None,
) -> Path:
    """Train a model, or resume from the checkpoint in `out`.

    Args:
        config: of the model.
        out: folder for checkpoints, text, log (`log.jsonl`) and, at the end, `model/`.
        data: directory of the books; the hub when None.
        device: to train on.
        tell: called with progress messages.
        steps: stop after this many steps, as if killed; the learning-rate schedule stays that of the whole run.

    Returns:
        The model's directory.

    Raises:
        UserError: the books are not available.
    """
    out.mkdir(parents=True, exist_ok=True)
    training = config.training
    pieces = lambda: text.pieces(config.text, config.seed, data)  # noqa: E731
    tokens = tokenizer.stored(out / "tokenizer.json", pieces, config.shape.vocabulary)
    wrapped = tokenizer.wrapped(tokens, config.sinks)
    tell(f"{config.steps:,} steps of {training.batch * training.sample:,} tokens; making the text")
    count = config.steps * training.batch * training.sample
    ids = text.token_file(out / "text.u16", tokenizer.wrapped(tokens, 0), pieces(), count + _PROBE_SAMPLES * training.sample)  # type: ignore[no-untyped-call]
    samples = Samples(ids[:count], training.sample, config.sinks, config.seed)
    held_out = Samples(ids[count:], training.sample, config.sinks, config.seed)
    probed = torch.stack([held_out[i]["input_ids"] for i in range(_PROBE_SAMPLES)]).to(device)
    trainer = _trainer(config, new_model(config), out, device, samples)
    trainer.losses = []
    trainer.add_callback(_Log(out / "log.jsonl", config, trainer.losses, probed, tell))
    if steps is not None:
        trainer.add_callback(_StopAfter(steps))
    checkpoints = sorted(out.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    trainer.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
    if trainer.state.global_step >= config.steps:
        wrapped.save_pretrained(out / "model")
        _save_model(config, trainer.model, out, device)
    return out / "model"


def _save_model(config: PretrainConfig, trained: Any, out: Path, device: torch.device) -> None:
    """Write weights, training curve and model card."""
    model = getattr(trained, "_orig_mod", trained)  # of torch.compile
    model.half().save_pretrained(out / "model")  # float16 halves the size
    about = {"device": device_name(device), "threads": torch.get_num_threads(), "torch": torch.__version__}
    about["transformers"] = version("transformers")
    parameters = sum(p.numel() for p in model.parameters())
    (out / "model" / curve.NAME).write_text(curve.curve(out / "log.jsonl"), encoding="utf-8")
    (out / "model" / "README.md").write_text(card(config, out / "log.jsonl", parameters, about), encoding="utf-8")


class _StopAfter(TrainerCallback):
    """Stops training early, with a checkpoint."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= self._steps:
            control.should_save = control.should_training_stop = True


def _trainer(config: PretrainConfig, model: LlamaForCausalLM, out: Path, device: torch.device, samples: Samples) -> _Trainer:
    training, steps = config.training, config.steps
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=training.batch, learning_rate=training.learning_rate,
        weight_decay=training.weight_decay, adam_beta2=0.95, max_grad_norm=1.0, lr_scheduler_type="warmup_stable_decay",
        warmup_steps=round(training.warmup * steps),
        lr_scheduler_kwargs={"num_decay_steps": max(1, round(training.decay * steps)), "min_lr_ratio": 0.1},
        save_steps=training.checkpoint_every, save_total_limit=1, logging_strategy="no", report_to=[], seed=config.seed,
        data_seed=config.seed, bf16=training.dtype == "bfloat16", use_cpu=device.type == "cpu", torch_compile=training.compile,
        dataloader_num_workers=0, disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = _Trainer(model=model, args=arguments, train_dataset=samples)
    trainer.remove_callback(PrinterCallback)
    return trainer
