"""transformers' Trainer within a budget: one callback, nothing else changes. TRL's trainers take it, too.

python examples/transformers_trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from remat.integrations.transformers import RematCallback

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4, vocab_size=256
)


def train(callbacks: list) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    rows = torch.randint(0, 256, (64, 64))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            max_steps=8,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    callback = RematCallback(activations=0.6)  # on a GPU one would rather write budget="16GiB"
    within_budget = train([callback])
    print(callback.report)
    plain = train([])
    print("losses", " ".join(f"{loss:.4f}" for loss in within_budget))
    print("the same losses as without remat:", within_budget == plain)


if __name__ == "__main__":
    main()
