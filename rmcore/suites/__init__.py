"""Public benchmarks of reward models: their files, and their scores by their own rules."""
