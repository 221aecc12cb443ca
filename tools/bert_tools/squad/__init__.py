"""Fine-tune BERT on questions (SQuAD) with data parallel, sharded or pipelined training."""
