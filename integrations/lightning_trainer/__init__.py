"""Lightning's Trainer over a pool. Imports Lightning, `torchmetrics` and `frameworks`."""
