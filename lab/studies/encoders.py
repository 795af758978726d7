"""Trains the small encoders of docs/tasks/attention.md, for the suites `attention-encoder` and `attention-vision`.

    python -m kvbench.lab.studies.encoders bert pretrained/bert          # minutes of a core each
    python -m kvbench.lab.studies.encoders vit pretrained/vit            # the same with --registers 4
    bench run attention-encoder --model pretrained/bert --set data=prose

A BERT fills in masked words of generated prose. A vision transformer, DINOv2's with or without registers, fills in masked
patches of drawn shapes, and its [CLS] says the image's colours. B samples, T tokens, P patches, E width.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import BertWordPieceTokenizer
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy, interpolate, mse_loss
from transformers import BertConfig, BertForMaskedLM, Dinov2WithRegistersConfig, Dinov2WithRegistersModel
from transformers.models.bert import BertTokenizerFast  # type: ignore[attr-defined]

from kvbench.harness.data.prose import Prose
from kvbench.lab.attention.images import shapes

SEED_OF_TEXT, CHARACTERS = 1_000_003, 6_000_000  # suites read seed 0
WORDS, TOKENS, BATCH, MASKED = 512, 128, 16, 0.15
IMAGES, SIDE, PATCH, PATCHES_MASKED = 3_000, 64, 8, 0.5
SHAPE: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "initializer_range": 0.05}
LOG_EVERY = 100


def trained(model: nn.Module, losses: Iterator[Tensor], steps: int, rate: float, out: Path) -> None:
    """Take steps of AdamW: 5 % warm-up, then a cosine to 0. The mean losses go to `log.jsonl`."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.05, cycle_momentum=False)
    seen: list[float] = []
    with (out / "log.jsonl").open("w", encoding="utf-8") as log:
        for step in range(1, steps + 1):
            loss = next(losses)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            seen.append(float(loss.detach()))
            if step % LOG_EVERY == 0:
                log.write(json.dumps({"step": step, "loss": round(float(np.mean(seen[-LOG_EVERY:])), 4)}) + "\n")
                log.flush()


def bert(out: Path, steps: int, seed: int) -> nn.Module:
    """Words are masked as published: 15 %, of which 80 % become [MASK], 10 % another word and 10 % stay."""
    text = Prose(SEED_OF_TEXT).text(CHARACTERS)
    pieces = BertWordPieceTokenizer()
    pieces.train_from_iterator(text.split("\n"), vocab_size=WORDS, show_progress=False)
    pieces.save_model(str(out))
    tokenizer = BertTokenizerFast(str(out / "vocab.txt"))
    tokenizer.save_pretrained(out)
    ids = torch.tensor(pieces.encode(text, add_special_tokens=False).ids)
    config = BertConfig(
        vocab_size=len(tokenizer),
        intermediate_size=192,
        max_position_embeddings=TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **SHAPE,
    )
    model, draw = BertForMaskedLM(config), torch.Generator().manual_seed(seed)
    around = [torch.full((BATCH, 1), i) for i in (tokenizer.cls_token_id, tokenizer.sep_token_id)]

    def losses() -> Iterator[Tensor]:
        while True:
            starts = torch.randint(len(ids) - TOKENS, (BATCH, 1), generator=draw)
            said = torch.cat([around[0], ids[starts + torch.arange(TOKENS - 2)], around[1]], 1)
            chance, fate = (torch.rand(said.shape, generator=draw) for _ in range(2))
            asked = chance < MASKED
            asked[:, 0] = asked[:, -1] = False
            read = said.masked_fill(asked & (fate < 0.8), tokenizer.mask_token_id)
            other = torch.randint(5, len(tokenizer), said.shape, generator=draw)
            read = torch.where(asked & (fate >= 0.9), other, read)
            yield cross_entropy(model(input_ids=read).logits[asked], said[asked])

    trained(model, losses(), steps, 2e-3, out)
    return model


def vit(out: Path, steps: int, seed: int, registers: int) -> nn.Module:
    """Half of the patches are masked; their pixels are to be said, and by [CLS] the whole image at 4 x 4 pixels."""
    drawn = (torch.from_numpy(shapes(SEED_OF_TEXT).load(number).copy()) for number in range(IMAGES))
    small = [interpolate(x.permute(2, 0, 1)[None] / 127.5 - 1, SIDE, mode="bilinear", antialias=True) for x in drawn]
    images, grid = torch.cat(small), SIDE // PATCH
    config = Dinov2WithRegistersConfig(
        mlp_ratio=2, image_size=SIDE, patch_size=PATCH, num_register_tokens=registers, drop_path_rate=0.0, **SHAPE
    )
    model, width = Dinov2WithRegistersModel(config), SHAPE["hidden_size"]
    heads, draw = nn.ModuleList([nn.Linear(width, 3 * PATCH**2), nn.Linear(width, 48)]), torch.Generator().manual_seed(seed)

    def losses() -> Iterator[Tensor]:
        while True:
            pixels = images[torch.randint(IMAGES, (BATCH,), generator=draw)]
            flips, turns = torch.randint(2, (2,), generator=draw).tolist(), int(torch.randint(4, (), generator=draw))
            pixels = pixels.flip([2 + axis for axis, flip in enumerate(flips) if flip]).rot90(turns, (2, 3))
            masked = torch.rand(BATCH, grid**2, generator=draw) < PATCHES_MASKED
            hidden = model(pixel_values=pixels, bool_masked_pos=masked)[0]
            patches = nn.functional.unfold(pixels, PATCH, stride=PATCH).mT  # [B, P, 3 * PATCH ** 2]
            said = heads[0](hidden[:, 1 + registers :])
            colours = adaptive_avg_pool2d(pixels, 4).flatten(1)
            yield mse_loss(said[masked], patches[masked]) + mse_loss(heads[1](hidden[:, 0]), colours)

    trained(nn.ModuleList([model, heads]), losses(), steps, 1e-3, out)
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the one that was asked for, and save it in half precision."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("bert", "vit"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--registers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(given.seed)
    run = (given.out, given.steps, given.seed)
    made = bert(*run) if given.kind == "bert" else vit(*run, given.registers)
    made.eval().half().save_pretrained(given.out)  # type: ignore[operator, union-attr]


if __name__ == "__main__":
    main()
