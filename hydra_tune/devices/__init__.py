"""Devices, their slots and streams, host buffers, and meters of bytes. Only this folder calls `torch.cuda`."""
