"""Fine-tuning for SQuAD: question answering, under data and pipeline parallelism."""
