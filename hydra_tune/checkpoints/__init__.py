"""What a trial leaves on disk, and goes on from after its process has died. Imports `planning` and below."""
