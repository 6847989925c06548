"""What a trial leaves on disk, and goes on from. Imports `planning` and below."""
