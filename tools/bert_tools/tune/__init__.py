"""Search hyper-parameters with many short trainings by `train`, and write the best config."""
