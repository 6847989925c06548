"""LightningModules small enough to train in a test, and a Trainer that says nothing."""

import copy

import lightning.pytorch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hydra_tune
import hydra_tune.blocks.root

WIDTH, CLASSES = 32, 8
SPILLED, RESIDENT = 90 << 10, 16 << 20  # the weights take 104 KiB


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.drop(self.norm(x)))))


def data(rows=16):
    """The same each time, whatever was drawn before."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(rows, WIDTH, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)
    )


class Classifier(lightning.LightningModule):
    """Calls itself."""

    def __init__(self, lr=0.01, depth=6):
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
    states = [v for o in used.optimizers for s in o.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
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


class PartsOnly(Classifier):
    """Its step calls parts of it, never itself, and returns more than a loss."""

    def loss_of(self, batch):
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), y)

    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "batch": batch[0]}


class ItselfAndParts(Classifier):
    """Twice itself, and once a part."""

    def loss_of(self, batch):
        x, y = batch
        logits = self(x) + self(x.flip(0)).flip(0)
        return nn.functional.cross_entropy(logits, y) + self.layers[3](x).square().mean()


class Mlp(nn.Sequential):
    def __init__(self, inside, outside):
        middle = [each for _ in range(3) for each in (nn.Linear(64, 64), nn.Dropout(0.1), nn.ReLU())]
        super().__init__(nn.Linear(inside, 64), nn.ReLU(), *middle, nn.Linear(64, outside))


class Gan(Classifier):
    """Two optimizers over two parts, which the step steps itself."""

    def __init__(self):
        super().__init__(depth=0)
        self.automatic_optimization = False
        self.generator, self.judge = Mlp(8, WIDTH), Mlp(WIDTH, 1)
        self.head = None

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch, batch_idx):
        real, _ = batch
        generator, judge = self.optimizers()
        fake, ones = self(torch.randn(len(real), 8, device=self.device)), torch.ones(len(real), 1, device=self.device)
        of = nn.functional.binary_cross_entropy_with_logits
        self.toggle_optimizer(judge)
        of_judge = of(self.judge(real), ones) + of(self.judge(fake.detach()), 0 * ones)
        judge.zero_grad()
        self.manual_backward(of_judge)
        judge.step()
        self.untoggle_optimizer(judge)
        self.toggle_optimizer(generator)
        of_generator = of(self.judge(fake), ones)
        generator.zero_grad()
        self.manual_backward(of_generator)
        generator.step()
        self.untoggle_optimizer(generator)
        for schedule in self.lr_schedulers():
            schedule.step()
        self.losses += [of_judge.item(), of_generator.item()]

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.judge(self(batch[0][:, :8])).mean())

    def configure_optimizers(self):
        optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.generator, self.judge)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]


class ByHand(Classifier):
    """One optimizer, stepped by hand, with a closure, and gradients of two batches a step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class WithAnExample(Classifier):
    """Which a ModelSummary runs."""

    def __init__(self):
        super().__init__()
        self.example_input_array = torch.randn(4, WIDTH)


class Unfreezes(lightning.pytorch.callbacks.BaseFinetuning):
    """Some layers are trained from the second epoch on, as a group of their own."""

    def freeze_before_training(self, module):
        self.freeze(module.layers, train_bn=False)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.layers[3:], optimizer, lr=0.001)


class TrainsSome(Classifier):
    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Copies(lightning.Callback):
    """A copy of the module in the middle of its training is a plain one."""

    def on_train_epoch_end(self, trainer, module):
        twin = copy.deepcopy(module).eval()
        assert hydra_tune.blocks.root.trial_of(twin) is None
        with torch.no_grad():
            module.losses.append(twin(torch.ones(2, WIDTH)).sum().item())


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Plateau(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Measured(Classifier):
    """With metrics of torchmetrics."""

    def __init__(self):
        super().__init__()
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

        self.accuracy = MulticlassAccuracy(CLASSES)
        self.of_validation = MetricCollection([MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)], prefix="val_")

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.losses.append(logits.sum().item())
        self.log("accuracy", self.accuracy(logits, y), on_epoch=True)
        self.log("running", self.accuracy, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.of_validation.update(self(batch[0]), batch[1])
        self.log_dict(self.of_validation)


class Draws(Classifier):
    """In hooks, and at places where Lightning calls the module: numbers that would be others elsewhere."""

    def on_fit_start(self):
        self.losses.append(torch.rand(()).item())

    def on_train_epoch_start(self):
        self.losses.append(torch.rand(()).item())

    def on_validation_epoch_end(self):
        self.losses.append(self(torch.randn(4, WIDTH)).sum().item())

    def on_after_backward(self):
        for p in self.parameters():
            p.grad.add_(0.001)

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)
