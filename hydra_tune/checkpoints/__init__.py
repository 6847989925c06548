"""What a trial leaves on disk, and goes on from after its process has died. Imports `planning` and below.

`resumption` decides when a checkpoint is written and goes on from one, `contents` what is in it, `checkpoint_folder`
how it lies on disk, `interval` how often one is due.
"""
