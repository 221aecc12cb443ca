"""The optimizer and the step of a run, made of the same parts as in `train`."""

from mlperf_bert.optim.optimizers import make_optimizer
from mlperf_bert.optim.schedule import rates_of_run
from mlperf_bert.step.captured import CapturedStep
from mlperf_bert.step.data_parallel import make_data_parallel
from mlperf_bert.step.eager import EagerStep


def make_step(model, config, info, device, shapes=()):
    """The optimizer of this rank's part of the state, and the step; captured if it has shapes."""
    averaged, initial = make_data_parallel(model, config, info, device)
    optimizer = make_optimizer(
        config.optim, averaged.buffers, initial, averaged.gradients, averaged.shards
    )
    rates, precision = rates_of_run(config, device), config.model.precision
    eager = EagerStep(averaged.model, optimizer, rates, averaged.clipping, model.step, precision)
    if not shapes:
        return optimizer, eager
    micro_batches = config.parallel.grad_accum_steps
    return optimizer, CapturedStep(eager, shapes, micro_batches=micro_batches, device=device)
