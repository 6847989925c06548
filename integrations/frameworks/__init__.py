"""What every training framework needs where trials run side by side in one process."""
