"""LightningModules small enough to train in a test, and a Trainer that says nothing."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hydra_tune

WIDTH, CLASSES = 32, 8
SPILLED, RESIDENT = 130 << 10, 16 << 20  # the weights take 200 KiB


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.drop(self.norm(x)))))


def data(rows=24):
    """The same each time, whatever was drawn before."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(rows, WIDTH, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)
    )


class Classifier(lightning.LightningModule):
    """Calls itself."""

    def __init__(self, lr=0.01, depth=12):
        super().__init__()
        self.layers = nn.Sequential(*[Layer() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.lr, self.losses = lr, []

    def forward(self, x):
        return self.head(self.layers(x))

    def loss_of(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss_of(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss_of(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def trainer(callbacks=(), kind=lightning.Trainer, **options):
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    silent |= {"enable_checkpointing": False, "max_epochs": 2}
    return kind(callbacks=list(callbacks), **(silent | options))


def loaders():
    return DataLoader(data(), batch_size=4, shuffle=True), DataLoader(data(8), batch_size=4)


def left_by(module, used):
    """What a training has changed, and the random state."""
    states = [v for o in used.optimizers for s in o.state.values() for v in s.values()]
    tensors = [*module.state_dict().values(), *states, torch.get_rng_state()]
    metrics = {name: value.item() for name, value in used.callback_metrics.items()}
    return list(module.losses), metrics, [t.clone() for t in tensors]


def trained(callbacks=(), make=Classifier, more=(), **options):
    torch.manual_seed(0)
    module = make()
    used = trainer([*callbacks, *(each() for each in more)], **options)
    used.fit(module, *loaders())
    return left_by(module, used)


def equal(found, wanted):
    (losses, metrics, tensors), (other_losses, other_metrics, others) = found, wanted
    same = len(tensors) == len(others) and all(map(torch.equal, tensors, others))
    return same and losses == other_losses and metrics == other_metrics


def in_pool(budget, train, **options):
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        found = train([hydra_tune.HydraLightningCallback(pool)], **options)
        trials = pool.report()["trials"]
        assert pool.devices[0].used_bytes == 0
    return found, trials
