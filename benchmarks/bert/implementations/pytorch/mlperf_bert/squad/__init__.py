"""SQuAD fine-tuning, by one rank or many in several ways, and the comparison of these."""
