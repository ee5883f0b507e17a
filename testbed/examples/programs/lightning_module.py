"""Lightning: ``--subject lightning --step lightning_module:make_module``."""

import os

import lightning.pytorch as lightning
import torch
from small_training import Network, Samples, collate


class Data(lightning.LightningDataModule):
    """The data, with the two values that autotune varies."""

    def __init__(self, batch_size=8, num_workers=0):
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers

    def train_dataloader(self):
        return torch.utils.data.DataLoader(
            Samples(),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=collate,
        )


class Module(lightning.LightningModule):
    """The network and its optimizer."""

    def __init__(self):
        super().__init__()
        self.network = Network()

    def training_step(self, batch, _):
        return self.network(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ShardedModule(Module):
    """The same, sharded with FSDP2."""

    def configure_model(self):
        torch.distributed.fsdp.fully_shard(
            self.network, mesh=self.device_mesh["data_parallel"]
        )


def make_module(strategy="ddp"):
    """Return the module, its data, and options of Lightning's ``Trainer``."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return Module(), Data()
    if strategy == "ddp":
        return Module(), Data(), {"devices": ranks, "strategy": "ddp"}
    sharded = lightning.strategies.ModelParallelStrategy(
        data_parallel_size=ranks, tensor_parallel_size=1
    )
    return ShardedModule(), Data(), {"devices": ranks, "strategy": sharded}
