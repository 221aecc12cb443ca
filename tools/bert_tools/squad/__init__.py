"""Fine-tune BERT to answer questions (SQuAD).

Training on several ranks is data-parallel, sharded or pipelined.
"""
