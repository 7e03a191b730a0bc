"""Train a transformers model within half of its activation memory. Runs on a CPU, too.

    python examples/fit_llama.py

The same lines work on a GPU with a real model; there one would rather write budget="16GiB". The optimizer is
given to fit because its state counts, too.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import remat

LAYERS, WIDTH, VOCABULARY, BATCH, LENGTH = 4, 64, 256, 4, 128


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=device)
    batch = {"input_ids": tokens, "labels": tokens}

    handle = remat.fit(model, batch, activations=0.5, optimizer=optimizer)
    print(handle.report())

    losses = []
    for _ in range(5):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
    print(handle.status())

    handle.remove()  # the model is as it was, trained
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
