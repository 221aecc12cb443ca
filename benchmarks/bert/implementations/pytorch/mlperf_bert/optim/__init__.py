"""Learning-rate schedules, and optimizers in two forms: a readable function and a class."""
