# shellcheck shell=bash disable=SC2034,SC2154 # names shared with run_and_time.sh
# Sourced by run_and_time.sh: where commands run. On this machine, on the nodes of a SLURM job, or
# beside others of the same script, where mpiexec or srun started one for each rank.
#
#   where    machine, slurm, or rank
#   PYTHON   an interpreter that has the package
#   leads    1 for the script that speaks and checks
#   and the beginnings of commands:
#   here     the interpreter, once
#   ranks    the interpreter on every rank, or one that starts the ranks itself
#   nodes    anything, once on every node
#   passed_on   the signal by which to end `ranks`, whichever came; empty: the one that came

is_one_of_many() { # whether this script runs once a rank
    [ -n "${OMPI_COMM_WORLD_RANK:-}" ] && return
    [ -n "${PMI_RANK:-}" ] && return
    [ -n "${SLURM_STEP_ID:-}" ] && [ "${SLURM_STEP_NUM_TASKS:-1}" -gt 1 ]
}

own_python() { # the interpreter of this tree, installed at first use
    PYTHON=${PYTHON:-$root/.venv/bin/python}
    [ "$PYTHON" != "$root/.venv/bin/python" ] || "$root/tools/venv.sh"
}

passed_on=
leads=1
nodes=()
if is_one_of_many; then
    where=rank
    PYTHON=${PYTHON:-$root/.venv/bin/python}
    command -v "$PYTHON" >/dev/null || fail "$PYTHON is missing; run tools/venv.sh before mpiexec"
    [ "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID:-0}}}" = 0 ] || leads=0
    here=("$PYTHON")
    ranks=("$PYTHON")
elif [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${SLURM_STEP_ID:-}" ]; then
    where=slurm
    # shellcheck source=slurm.sh
    . "$root/$launch/slurm.sh"
else
    where=machine
    unset SLURM_STEP_ID # of the one task of an interactive shell: its ranks are started below
    own_python
    here=("$PYTHON")
    ranks=("$PYTHON") # starts the ranks itself
fi
