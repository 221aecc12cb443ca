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

is_one_of_many() { # whether this script runs once a rank
    [ -n "${OMPI_COMM_WORLD_RANK:-}" ] && return
    [ -n "${PMI_RANK:-}" ] && return
    [ -n "${SLURM_STEP_ID:-}" ] && [ "${SLURM_STEP_NUM_TASKS:-1}" -gt 1 ]
}

own_python() { # the interpreter of this tree, installed at first use
    PYTHON=${PYTHON:-$root/.venv/bin/python}
    [ "$PYTHON" = "$root/.venv/bin/python" ] || return 0
    [ "${steps[0]:-}" != install ] || phase "install: this package and what it needs"
    "$root/tools/venv.sh" || exit
}

may_write() { # path; whether that, or else its nearest directory that is there, may be written to
    local path=$1
    until [ -e "$path" ]; do path=$(dirname "$path"); done
    [ -d "$path" ] && [ -w "$path" ]
}

check_python() { # whether PYTHON can run the package, before anything else asks it
    local status=0 lacks="import sys
if sys.version_info < (3, 11): sys.exit(3)
import importlib.util as u
sys.exit(4 if None in map(u.find_spec, ('mlperf_bert', 'torch')) else 0)"
    local remedy="leave PYTHON out for .venv, made at first use, or give an interpreter that has the package"
    command -v "$PYTHON" >/dev/null || fail "PYTHON: there is no program '$PYTHON'; $remedy"
    "$PYTHON" -c "$lacks" >/dev/null 2>&1 || status=$?
    case $status in
    0) ;;
    3) fail "PYTHON: '$PYTHON' is older than Python 3.11; $remedy" ;;
    4) fail "PYTHON: '$PYTHON' lacks the package or torch; $remedy" ;;
    *) fail "PYTHON: '$PYTHON' does not run Python (status $status); $remedy" ;;
    esac
}

passed_on=
leads=1
nodes=()
if is_one_of_many; then
    [ "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID:-0}}}" = 0 ] || leads=0
fi
if [ "$leads" = 1 ]; then
    [ "${PYTHON:-$root/.venv/bin/python}" = "$root/.venv/bin/python" ] || [ -n "${CONT:-}${SIF:-}" ] || check_python
    may_write "$LOGDIR" ||
        fail "LOGDIR: '$LOGDIR' cannot be made or written to; give one where you may write, on a disk that is not read-only"
    say_plan
fi
trap interrupted INT
if is_one_of_many; then
    where=rank
    PYTHON=${PYTHON:-$root/.venv/bin/python}
    command -v "$PYTHON" >/dev/null || fail "$PYTHON is missing; run tools/venv.sh before mpiexec"
    # srun sets PMI_SIZE too, to the number of its tasks; mpiexec may itself be in a task of srun's.
    size=${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-${SLURM_STEP_NUM_TASKS:-}}}
    started_by="mpiexec -n $size"
    [ -n "${OMPI_COMM_WORLD_SIZE:-}" ] || [ "$size" != "${SLURM_STEP_NUM_TASKS:-}" ] || started_by="srun -n $size"
    here=("$PYTHON" -P)
    ranks=("$PYTHON" -P)
elif [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${SLURM_STEP_ID:-}" ]; then
    where=slurm
    # shellcheck source=slurm.sh
    . "$root/$launch/slurm.sh"
else
    where=machine
    unset SLURM_STEP_ID # of the one task of an interactive shell: its ranks are started below
    own_python
    here=("$PYTHON" -P)
    ranks=("$PYTHON" -P) # starts the ranks itself
fi
