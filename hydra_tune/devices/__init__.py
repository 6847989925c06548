"""Bytes and streams: devices, their slots, host buffers, and what counts bytes. Alone it names `torch.cuda`."""
