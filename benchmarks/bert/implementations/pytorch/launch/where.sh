# shellcheck shell=bash disable=SC2034,SC2154 # run_and_time.sh shares these variables.
# Sourced by run_and_time.sh: finds out where commands run. This can be one machine, the nodes of a SLURM job, or one
# of several copies of the script, if mpiexec or srun started one copy per rank. It sets:
#
#   where    machine, slurm, or rank
#   PYTHON   an interpreter that has the package
#   leads    1 in the copy of the script that prints and checks
#   started_by  the launcher command, if it started one copy of this script per rank
#   passed_on   the signal that ends `ranks`, or empty to pass on the signal that arrived
#
# and these prefixes of commands:
#
#   here     runs the interpreter once
#   ranks    runs the interpreter on every rank, or runs one that starts the ranks itself
#   nodes    runs any command once on every node

own_python() { # Use the interpreter of this repository, which is installed at first use.
    PYTHON=${PYTHON:-$root/.venv/bin/python}
    [ "$PYTHON" = "$root/.venv/bin/python" ] || return 0
    [ "${steps[0]:-}" != install ] || phase "install: this package and its dependencies"
    "$root/tools/venv.sh" || exit
}

passed_on=
leads=1
nodes=()
where=machine
# srun also sets PMI_SIZE, to the number of its tasks. mpiexec may itself run in a task of srun.
size=${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-${SLURM_STEP_NUM_TASKS:-1}}}
if [ "$size" -gt 1 ]; then
    where=rank
elif [ -n "${SLURM_STEP_ID:-}" ]; then # An interactive shell is a step of one task. It starts the ranks of its node itself.
    unset SLURM_STEP_ID PMI_RANK PMI_SIZE
    [ "${SLURM_JOB_NUM_NODES:-1}" = 1 ] || where=slurm SRUN_OPTIONS="--overlap ${SRUN_OPTIONS:-}"
elif [ -n "${SLURM_JOB_ID:-}" ]; then
    where=slurm
fi
if [ "$where" = rank ] && [ "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID:-0}}}" != 0 ]; then leads=0; fi
say_plan
trap interrupted INT
case $where in
rank)
    PYTHON=${PYTHON:-$root/.venv/bin/python}
    command -v "$PYTHON" >/dev/null || fail "$PYTHON: no such interpreter; run tools/venv.sh before the launcher"
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
    ranks=("$PYTHON" -P) # On one machine, the program starts the ranks itself.
fi
