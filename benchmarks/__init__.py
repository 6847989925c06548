"""Speed, each figure a ratio against its baseline in the same run. Results lie in benchmarks/results."""
