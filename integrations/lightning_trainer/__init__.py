"""Lightning's Trainer."""
