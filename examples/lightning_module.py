"""Lightning's Trainer within a budget: one callback, no strategy.

python examples/lightning_module.py
"""

import logging
import warnings

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remat.integrations.lightning import RematCallback


class Translator(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed": nn.Embedding(128, 64),
                "encoder": nn.TransformerEncoder(
                    nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True),
                    num_layers=6,
                    enable_nested_tensor=False,
                ),
                "head": nn.Linear(64, 128),
            }
        )

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        hidden = self.model["encoder"](self.model["embed"](batch))
        loss = F.cross_entropy(self.model["head"](hidden).flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    callback = RematCallback(activations=0.5)  # on a GPU one would rather write budget="16GiB"
    trainer = lightning.Trainer(
        max_steps=6, callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    data = torch.utils.data.DataLoader(torch.randint(0, 128, (96, 64)), batch_size=16)
    trainer.fit(Translator(), data)
    print(callback.report)
    print("loss", round(trainer.callback_metrics["loss"].item(), 4))


if __name__ == "__main__":
    main()
