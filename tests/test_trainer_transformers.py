"""The Trainer of transformers trains with AdaFisher as a loop of one's own does, and resumes to the same bits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from torch_helpers import TOLERANCE, assert_same  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402

SMALL = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
STEPS, HALF = 6, 3  # TCov is 2: HALF lies between two sampled steps
OPTIONS: dict[str, Any] = {"lr": 1e-3, "TCov": 2, "averaging": "paper"}


def bert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(**SMALL, **sizes, max_position_embeddings=16))


def gpt2() -> nn.Module:
    """Its layers are Conv1D, and its head shares the weight of its embedding."""
    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**SMALL, **dropout, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def texts(model: nn.Module, count: int = 24) -> list[dict[str, Any]]:
    tokens = torch.randint(50, (count, 12), generator=torch.Generator().manual_seed(1))
    classes = isinstance(model, BertForSequenceClassification)
    return [{"input_ids": row, "labels": int(row[0] > 25) if classes else row} for row in tokens]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    given = {
        **{"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "max_steps": STEPS},
        **{"per_device_train_batch_size": 4, "lr_scheduler_type": "linear", "warmup_steps": 2},
        **options,
    }
    return TrainingArguments(str(folder), **given)


def trainer(optimizer: AdaFisher, folder: Path, **options: Any) -> Trainer:
    data = texts(optimizer.model)
    return Trainer(
        optimizer.model, arguments(folder, **options), train_dataset=data, eval_dataset=data[:4],
        optimizers=(optimizer, None),
    )  # fmt: skip


def every_layer_has_moved(optimizer: AdaFisher) -> bool:
    return not any(bool((factor == 1).all()) for pair in optimizer.factors().values() for factor in pair)


@pytest.mark.parametrize("make", [bert, gpt2])
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"eval_strategy": "steps", "eval_steps": 1},
    ],
    ids=["accumulated, clipped", "bfloat16", "recomputed", "evaluated"],
)
def test_resumes_to_the_same_bits(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Model, optimizer, scheduler and random numbers (of dropout and shuffling) from a checkpoint."""
    options = {**options, "save_strategy": "steps", "save_steps": HALF}
    unbroken = AdaFisher(make(), **OPTIONS)
    trainer(unbroken, tmp_path, **options).train()
    resumed = AdaFisher(make(), **OPTIONS)
    trainer(resumed, tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{HALF}"))
    assert unbroken.steps == STEPS and every_layer_has_moved(unbroken)
    assert_same(resumed, unbroken)


def test_trains_as_a_loop_does(tmp_path: Path) -> None:
    """On the batches that the Trainer has drawn: accumulated, clipped, with its schedule; without dropout."""
    micro = 2
    theirs, calls = AdaFisher(gpt2(), **OPTIONS), []
    clipped = trainer(theirs, tmp_path, gradient_accumulation_steps=micro, max_grad_norm=0.1)
    theirs.model.register_forward_pre_hook(lambda model, args, kwargs: calls.append(kwargs), with_kwargs=True)
    clipped.train()
    assert len(calls) == micro * STEPS

    ours = AdaFisher(gpt2(), **OPTIONS)
    schedule = transformers.get_linear_schedule_with_warmup(ours, 2, STEPS)
    for first in range(0, micro * STEPS, micro):
        ours.zero_grad()
        for batch in calls[first : first + micro]:
            ours.model(**batch).loss.backward()  # over the number of tokens of all micro-batches
        nn.utils.clip_grad_norm_(ours.model.parameters(), 0.1)
        ours.step()
        schedule.step()
    assert_same(theirs, ours)


def test_compiled_by_the_trainer(tmp_path: Path) -> None:
    """The models of transformers keep books in their `config` while they are compiled."""
    optimizers = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        torch._dynamo.reset()
        model = bert()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # compiled code draws other random numbers
        optimizers.append(AdaFisher(model, **OPTIONS))
        trainer(optimizers[-1], tmp_path, **options).train()
    assert every_layer_has_moved(optimizers[1])
    assert_same(*optimizers, 5 * TOLERANCE)  # sums are taken in another order in compiled code


def test_made_by_the_trainer(tmp_path: Path) -> None:
    """`model` among the arguments takes the place of the parameters."""
    given = AdaFisher(bert(), **OPTIONS)
    trainer(given, tmp_path).train()
    model = bert()
    made = Trainer(
        model, arguments(tmp_path), train_dataset=texts(model),
        optimizer_cls_and_kwargs=(AdaFisher, {"model": model, **OPTIONS}),
    )  # fmt: skip
    made.train()
    assert_same(made.optimizer.optimizer, given)


def test_decay_groups(tmp_path: Path) -> None:
    """By patterns, the groups that the Trainer would make; each follows the schedule from its own learning rate."""
    no_decay = {"params": ["*.bias", "*LayerNorm*"], "weight_decay": 0.0, "lr": 2e-3}

    def make() -> AdaFisher:
        return AdaFisher(bert(), **OPTIONS, weight_decay=0.1, param_groups=[no_decay])

    options = {"save_strategy": "steps", "save_steps": HALF}
    unbroken, resumed = make(), make()
    first = trainer(unbroken, tmp_path, **options)
    first.train()
    names = {id(p): name for name, p in unbroken.model.named_parameters()}
    decays, decay = set(first.get_decay_parameter_names(unbroken.model)), unbroken.param_groups[1]
    assert {names[id(p)] for p in decay["params"]} == decays and decay["weight_decay"] == 0.1
    trainer(resumed, tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{HALF}"))
    rates = [group["initial_lr"] for group in resumed.param_groups]
    assert rates == [2e-3, 1e-3]
    assert_same(resumed, unbroken)


def test_frozen_body(tmp_path: Path) -> None:
    """Only the head trains, and only its layer is sampled."""
    model = bert()
    model.bert.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = AdaFisher(model, **OPTIONS)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*factors")
        trainer(optimizer, tmp_path).train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"classifier.weight", "classifier.bias"}
    assert bool((optimizer.factors()["classifier"][0] != 1).any())


def test_trains_again(tmp_path: Path) -> None:
    """A second `train()` goes on with the same optimizer."""
    optimizer = AdaFisher(bert(), **OPTIONS)
    twice = trainer(optimizer, tmp_path)
    twice.train()
    before = optimizer.model.classifier.weight.detach().clone()
    twice.train()
    assert optimizer.steps == 2 * STEPS
    assert not torch.equal(optimizer.model.classifier.weight, before)
