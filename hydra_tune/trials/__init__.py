"""One trial's life: `prepare`, its steps, where its tensors are, its loaders, its end. Imports all but integrations."""
