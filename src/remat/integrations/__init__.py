"""One file per library, each imported when it is asked for:

    from remat.integrations.transformers import RematCallback   # transformers' Trainer, TRL's trainers
    from remat.integrations.lightning import RematCallback      # Lightning's Trainer
    from remat.integrations.lightning import fit                # Lightning Fabric

accelerate, diffusers, PEFT, DDP and FSDP2 need no file: `remat.fit` takes their models as they are.
"""

from remat._lazy import submodules

__getattr__ = submodules(__name__)
