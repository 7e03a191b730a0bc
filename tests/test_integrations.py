"""Trainers with and without remat: the same losses and the same checkpoints, to the bit, over 20 steps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from models import MlpBlock

STEPS = 20
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=64, max_position_embeddings=64, attention_dropout=0.1
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows(length: int = 32) -> list[dict[str, Tensor]]:
    made = torch.randint(3, 64, (96, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in made]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal_weights(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


def touched(model: nn.Module) -> list[str]:
    """Modules that have a forward of their own, or hooks."""
    return [
        n
        for n, m in model.named_modules()
        if "forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks
    ]


# ------------------------------------------------------------------------------------------- transformers


def arguments(path: Path, **more: Any) -> Any:
    from transformers import TrainingArguments

    settings = {
        "per_device_train_batch_size": 4, "max_steps": STEPS, "logging_steps": 1, "report_to": [], "seed": 3,
        "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-3,
    }  # fmt: skip
    return TrainingArguments(str(path), **{**settings, **more})


def trained(model: nn.Module, path: Path, callbacks: Any = (), resume: Any = None, **more: Any) -> Any:
    from transformers import Trainer

    trainer = Trainer(model, arguments(path, **more), train_dataset=rows(), callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
        {"bf16": True, "label_smoothing_factor": 0.1},
    ],
    ids=["plain", "accumulation, checkpointing asked for", "bf16 autocast, label smoothing"],
)
def test_transformers_trainer(tmp_path: Path, more: dict[str, Any]) -> None:
    from remat.integrations.transformers import RematCallback

    plain, fitted = llama(), llama()
    expected = trained(plain, tmp_path, **more)
    callback = RematCallback(activations=0.65)
    trainer = trained(fitted, tmp_path, [callback], **more)
    assert len(losses(expected)) == STEPS
    assert losses(trainer) == losses(expected)
    assert_equal_weights(weights(fitted), weights(plain))
    assert callback.report is not None
    assert callback.report.verification.bitwise
    assert all(row.recomputed and not row.fallbacks for row in callback.report.rows)
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    for name in ("budget_bytes", "predicted_peak_bytes", "slowdown", "fallbacks"):
        assert f"remat/{name}" in entry
    assert touched(fitted) == touched(plain)  # by the trainer, not by us
    assert not {"training_step", "log"} & set(vars(trainer))


def test_a_checkpoint_of_a_planned_training_is_resumed(tmp_path: Path) -> None:
    from remat.integrations.transformers import RematCallback

    plain, fitted = llama(), llama()
    every = {"save_strategy": "steps", "save_steps": 10}
    trained(plain, tmp_path / "plain", **every)
    trained(fitted, tmp_path / "fitted", [RematCallback(activations=0.7)], **every)
    from safetensors.torch import load_file

    for step in (10, 20):
        ours, theirs = (
            load_file(tmp_path / kind / f"checkpoint-{step}" / "model.safetensors")
            for kind in ("fitted", "plain")
        )
        assert_equal_weights(ours, theirs)
    again = llama()
    trainer = trained(
        again,
        tmp_path / "again",
        [RematCallback(activations=0.7)],
        resume=str(tmp_path / "fitted" / "checkpoint-10"),
    )
    assert trainer.state.global_step == STEPS
    assert_equal_weights(weights(again), weights(plain))


def test_a_budget_out_of_reach_stops_the_training_before_it_starts(tmp_path: Path) -> None:
    from remat.integrations.transformers import RematCallback

    model = llama()
    before = weights(model)
    with pytest.raises(remat.BudgetError, match="raise the budget"):
        trained(model, tmp_path, [RematCallback(budget=1000)])
    assert_equal_weights(weights(model), before)
    with pytest.raises(remat.InputError, match="exactly one"):
        RematCallback()
    with pytest.raises(remat.InputError, match="gigs"):
        RematCallback(budget="16 gigs")
    with pytest.raises(remat.RematError, match=r"no transformers\.Trainer"):
        RematCallback(activations=0.5).on_train_begin(None, None, None)


def test_a_step_that_runs_out_of_memory_is_run_again(tmp_path: Path) -> None:
    """In the middle of an accumulation, too: losses and weights are those of a training that never failed."""
    from remat.integrations.transformers import RematCallback

    plain, fitted = llama(), llama()
    more = {"gradient_accumulation_steps": 2, "max_steps": 4}
    expected = trained(plain, tmp_path, **more)
    callback, calls = RematCallback(activations=0.65), []

    def fail_once(*_: Any) -> None:
        if callback.handle is not None:  # not while planning
            calls.append(1)
            if len(calls) == 4:
                raise torch.OutOfMemoryError("no room, for once")

    hook = fitted.model.layers[2].register_forward_hook(fail_once)
    trainer = trained(fitted, tmp_path, [callback], **more)
    hook.remove()
    assert losses(trainer) == losses(expected)
    assert_equal_weights(weights(fitted), weights(plain))
    assert "recovered" in str(callback.report)


def test_sft_trainer(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from remat.integrations.transformers import RematCallback

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 64)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>",
    )  # fmt: skip
    data = Dataset.from_list(
        [{"input_ids": row["input_ids"].tolist(), "labels": row["input_ids"].tolist()} for row in rows()]
    )

    def run(callbacks: list[Any]) -> tuple[Any, nn.Module]:
        config = SFTConfig(
            str(tmp_path), per_device_train_batch_size=4, max_steps=STEPS, logging_steps=1, report_to=[],
            seed=3, use_cpu=True, save_strategy="no", disable_tqdm=True, bf16=False,
            gradient_checkpointing=True, dataset_kwargs={"skip_prepare_dataset": True}, learning_rate=1e-3,
        )  # fmt: skip
        model = llama()
        trainer = SFTTrainer(
            model, config, train_dataset=data, processing_class=tokenizer, callbacks=callbacks
        )
        trainer.train()
        return trainer, model

    # TRL's chunked head takes most of so small a step.
    (expected, plain), callback = run([]), RematCallback(activations=0.93)
    trainer, fitted = run([callback])
    names = ("loss", "mean_token_accuracy", "num_tokens", "entropy")
    kept = [
        {name: entry.get(name) for name in names} for entry in expected.state.log_history if "loss" in entry
    ]
    assert kept == [{name: e.get(name) for name in names} for e in trainer.state.log_history if "loss" in e]
    assert len(kept) == STEPS
    assert_equal_weights(weights(fitted), weights(plain))
    assert any(row.recomputed for row in callback.report.rows)


# ----------------------------------------------------------------------------------------------- lightning


def test_lightning_trainer(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from remat.integrations.lightning import RematCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(*[MlpBlock(32) for _ in range(5)])
            self.seen, self.total = 0, torch.zeros(())

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = self.net(batch).square().mean()
            self.seen += 1
            self.total += loss.detach()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Losses(lightning.Callback):
        def __init__(self) -> None:
            self.values: list[float] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            self.values.append(outputs["loss"].item())

    data = torch.randn(128 * STEPS, 32, generator=torch.Generator().manual_seed(1))

    def run(callbacks: list[Any], name: str) -> tuple[list[float], Any, Any]:
        lightning.seed_everything(1)
        module, seen = Module(), Losses()
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=STEPS, callbacks=[*callbacks, seen], enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path,
            log_every_n_steps=1, logger=lightning.pytorch.loggers.CSVLogger(tmp_path, name=name),
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=128))
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        return seen.values, module, trainer

    expected = run([], "plain")
    callback = RematCallback(activations=0.7)
    found = run([callback], "fitted")
    assert found[0] == expected[0]
    assert len(found[0]) == STEPS
    assert_equal_weights(weights(found[1]), weights(expected[1]))
    assert found[1].seen == expected[1].seen == STEPS  # steps of planning are not counted
    assert torch.equal(found[1].total, expected[1].total)
    assert any(row.recomputed for row in callback.report.rows)
    assert not touched(found[1])
    ours, theirs = (torch.load(tmp_path / f"{n}.ckpt", weights_only=False) for n in ("fitted", "plain"))
    assert_equal_weights(ours["state_dict"], theirs["state_dict"])
    log = next(tmp_path.glob("fitted/*/metrics.csv")).read_text()
    assert "remat/budget_bytes" in log.splitlines()[0]
    assert len(log.splitlines()) == 1 + STEPS


def test_lightning_with_a_model_that_checkpoints_itself(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from remat.integrations.lightning import RematCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()
            self.model.gradient_checkpointing_enable()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    class Seen(lightning.Callback):
        on = True

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            self.on = any(getattr(m, "gradient_checkpointing", False) for m in module.modules())

    def run(callbacks: list[Any]) -> Any:
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=2, callbacks=callbacks, enable_progress_bar=False, logger=False,
            enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=4))
        return module

    seen, callback = Seen(), RematCallback(activations=0.9, adaptive=False)
    found = run([callback, seen])
    assert not seen.on
    assert found.model.is_gradient_checkpointing
    assert_equal_weights(weights(found), weights(run([])))
    assert any(row.recomputed for row in callback.report.rows)


def test_lightning_refuses_what_it_cannot_do() -> None:
    pytest.importorskip("lightning")
    from remat.integrations.lightning import RematCallback

    strategy = type("DeepSpeedStrategy", (), {})()
    trainer = type("Trainer", (), {"strategy": strategy})()
    with pytest.raises(remat.InputError, match="DeepSpeedStrategy"):
        RematCallback("1GiB").on_train_batch_start(trainer, None, None, 0)


def test_fabric() -> None:
    lightning = pytest.importorskip("lightning")
    from remat.integrations.lightning import fit

    batch = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))

    def run(activations: float | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        net = nn.Sequential(*[MlpBlock(32) for _ in range(5)])
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        handle = None
        if activations:
            handle = fit(
                model, batch, activations=activations, loss=lambda output, batch: output.square().mean()
            )
        torch.manual_seed(2)
        for _ in range(STEPS):
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            assert all(row.recomputed and not row.fallbacks for row in handle.status().rows)
        return weights(net)

    assert_equal_weights(run(0.8), run(None))
    with pytest.raises(remat.InputError, match="was not set up by Fabric"):
        fit(nn.Linear(2, 2), batch, activations=0.5)


# ---------------------------------------------------------------------------------------- missing libraries


@pytest.mark.parametrize(
    ("library", "blocked", "extra"),
    [
        ("transformers", ["transformers"], "hf"),
        ("lightning", ["lightning", "pytorch_lightning"], "lightning"),
    ],
)
def test_a_missing_library_names_its_extra(library: str, blocked: list[str], extra: str) -> None:
    script = (
        f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\nimport remat.integrations.{library}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"pip install 'remat[{extra}]'" in done.stderr


# ------------------------------------------------------------------------------------------ adapters, k bits


def step_of(model: nn.Module) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (4, 32), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    torch.manual_seed(5)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def adapted(prepare: Callable[[nn.Module], nn.Module]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = prepare(llama())
    torch.manual_seed(0)
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    ).train()


def kbit(model: nn.Module) -> nn.Module:
    """What is done to a model loaded in 4 bits: frozen, norms in fp32, checkpointing on, inputs made to
    require gradients. The weights stay as they are: the packed kernels need CUDA."""
    from peft import prepare_model_for_kbit_training

    model.is_loaded_in_4bit = True
    return prepare_model_for_kbit_training(model)


@pytest.mark.parametrize("prepare", [lambda model: model, kbit], ids=["lora", "k-bit prepared"])
def test_adapters_on_a_frozen_model(prepare: Callable[[nn.Module], nn.Module]) -> None:
    expected = step_of(adapted(prepare))
    model = adapted(prepare)
    ids = torch.randint(3, 64, (4, 32))
    handle = remat.fit(model, {"input_ids": ids, "labels": ids}, activations=0.6)
    found = step_of(model)
    assert expected.keys() == found.keys()
    assert all("lora_" in name for name in found)
    assert len(found) == 4 * 2 * 2
    assert not [name for name in found if not torch.equal(found[name], expected[name])]
    assert all(row.recomputed and not row.fallbacks for row in handle.status().rows)
    assert not [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]  # not done twice
    handle.remove()
    assert step_of(model).keys() == expected.keys()
