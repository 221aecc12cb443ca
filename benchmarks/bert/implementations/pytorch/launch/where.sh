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
#   started_by  the launcher that began this script once a rank, as it is typed
#   passed_on   the signal by which to end `ranks`, whichever came; empty: the one that came

own_python() { # the interpreter of this tree, installed at first use
    PYTHON=${PYTHON:-$root/.venv/bin/python}
    [ "$PYTHON" = "$root/.venv/bin/python" ] || return 0
    [ "${steps[0]:-}" != install ] || phase "install: this package and what it needs"
    "$root/tools/venv.sh" || exit
}

passed_on=
leads=1
nodes=()
where=machine
if [ -n "${OMPI_COMM_WORLD_RANK:-}${PMI_RANK:-}" ]; then
    where=rank
elif [ -n "${SLURM_STEP_ID:-}" ]; then # an interactive shell is a step of one task: its ranks are started here
    if [ "${SLURM_STEP_NUM_TASKS:-1}" -gt 1 ]; then where=rank; else unset SLURM_STEP_ID; fi
elif [ -n "${SLURM_JOB_ID:-}" ]; then
    where=slurm
fi
if [ "$where" = rank ] && [ "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID:-0}}}" != 0 ]; then leads=0; fi
say_plan
trap interrupted INT
case $where in
rank)
    PYTHON=${PYTHON:-$root/.venv/bin/python}
    command -v "$PYTHON" >/dev/null || fail "$PYTHON is missing; run tools/venv.sh before mpiexec"
    # srun sets PMI_SIZE too, to the number of its tasks; mpiexec may itself be in a task of srun's.
    size=${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-${SLURM_STEP_NUM_TASKS:-}}}
    started_by="mpiexec -n $size"
    [ -n "${OMPI_COMM_WORLD_SIZE:-}" ] || [ "$size" != "${SLURM_STEP_NUM_TASKS:-}" ] || started_by="srun -n $size"
    ;;
slurm)
    # shellcheck source=slurm.sh
    . "$root/$launch/slurm.sh"
    ;;
machine) own_python ;;
esac
if [ "$where" != slurm ]; then
    here=("$PYTHON" -P)
    ranks=("$PYTHON" -P) # on one machine it starts the ranks itself
fi
