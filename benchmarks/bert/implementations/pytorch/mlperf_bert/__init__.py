"""BERT pre-training as an MLPerf benchmark; README.md at the top of the repository has the tour."""
