"""LoRA on a frozen model within a budget: no enable_input_require_grads, no gradient_checkpointing_enable.

    python examples/lora.py

Frozen weights have no gradients and no optimizer state, so that nearly all of the step's memory is
activations: this is where a budget saves most.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import remat


def main() -> None:
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=192, num_hidden_layers=6, num_attention_heads=4, vocab_size=256
        )
    )
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.05))
    model.print_trainable_parameters()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    tokens = torch.randint(0, 256, (4, 128))
    batch = {"input_ids": tokens, "labels": tokens}

    handle = remat.fit(model, batch, activations=0.4, optimizer=optimizer)
    print(handle.report())
    losses = []
    for _ in range(5):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
    untrained = handle.verification.untrained
    print("adapters without a gradient:", [name for name in untrained if "lora" in name] or "none")


if __name__ == "__main__":
    main()
